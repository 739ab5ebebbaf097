package purge

import (
	"context"
	"slices"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/outboxes"
)

// The ways to record a delivery, as in the configuration.
const (
	RecordWatermark = "watermark" // writes nothing
	recordDelete    = "delete"
	RecordMark      = "mark"
)

// markGroup is how many envelopes one update statement marks. The statement finds the places of each envelope by a
// search in a list of so many ids. A longer list costs more than it saves in statements.
const markGroup = 50

// Sent is an envelope that was delivered to all of its targets.
type Sent struct {
	NS string
	ID bson.RawValue
	// TS is the stamp. It is zero if the envelope has none, or if the stamp is older than the event by more than the
	// margin: then the envelope was copied here, and its stamp is not the time of the copy (N25). A mark gives such an
	// envelope a new stamp, by which it is purged.
	TS     bson.Timestamp
	Places []outboxes.Place
}

// estimateSize returns about how many bytes of a transaction the envelope takes.
func (s *Sent) estimateSize() int {
	n := 64 + len(s.ID.Value)
	for _, p := range s.Places {
		n += 64 + len(p.Topic)
	}
	return n
}

// RecordSent records that envelopes were delivered, in as many fenced transactions as their number requires. It marks
// them with the server's time and their places, or deletes them. mode is [RecordMark] or [recordDelete].
//
// It does not change an envelope that has become an exception, or that was replaced by a newer one with its id (N25). A
// missing envelope is not an error. So the call may be repeated. It returns when all of it is majority committed.
// Resolve the tickets of the envelopes only after that: after a crash, deliveries before the checkpoint are not recorded.
func RecordSent(ctx context.Context, f mongodb.Fencer, mode string, list []Sent) error {
	write := func(tx context.Context, c *mongo.Client, part []Sent) error {
		groups := map[sentGroup][]Sent{}
		for _, s := range part {
			g := sentGroup{ns: s.NS, stamped: !s.TS.IsZero()}
			groups[g] = append(groups[g], s)
		}
		for g, sent := range groups {
			if err := g.recordDeliveries(tx, c, mode, sent); err != nil {
				return err
			}
		}
		return nil
	}

	return mongodb.WriteInParts(ctx, f, list, mongodb.Parts[Sent]{
		Doing: "recording deliveries", Size: (*Sent).estimateSize, Write: write,
	})
}

// sentGroup identifies envelopes that one filter can select: of one collection, and all with a
// stamp or all without.
type sentGroup struct {
	ns      string
	stamped bool
}

// recordDeliveries deletes or marks the envelopes of the group.
func (g sentGroup) recordDeliveries(tx context.Context, client *mongo.Client, mode string, sent []Sent) error {
	coll := outboxes.CollectionOf(client, g.ns)

	if mode == recordDelete {
		_, err := coll.DeleteMany(tx, g.filterUnchanged(sent), options.DeleteMany().SetHint(outboxes.PickedByID))
		return mongodb.Refusal(err, "deleting delivered envelopes of "+g.ns, "remove", g.ns)
	}

	var updates []mongo.WriteModel
	for part := range slices.Chunk(sent, markGroup) {
		updates = append(updates, mongo.NewUpdateManyModel().SetFilter(g.filterUnchanged(part)).
			SetUpdate(g.markUpdate(part)).SetHint(outboxes.PickedByID))
	}
	_, err := coll.BulkWrite(tx, updates, options.BulkWrite().SetOrdered(false))
	return mongodb.Refusal(err, "marking delivered envelopes of "+g.ns, "find and update", g.ns)
}

// filterUnchanged returns the filter of N25: by id, without a state, and no newer than the newest of part.
func (g sentGroup) filterUnchanged(part []Sent) bson.D {
	f := bson.D{{Key: "_id", Value: bson.D{{Key: "$in", Value: envelopeIDs(part)}}}, {Key: "state", Value: nil}}
	if !g.stamped {
		return f
	}

	// An envelope that was inserted again with this id has a later stamp, and was not sent by this
	// delivery.
	newest := part[0].TS
	for _, s := range part[1:] {
		if s.TS.After(newest) {
			newest = s.TS
		}
	}
	return append(f, bson.E{Key: "ts", Value: bson.D{{Key: "$lte", Value: newest}}})
}

func envelopeIDs(part []Sent) []bson.RawValue {
	ids := make([]bson.RawValue, len(part))
	for i, s := range part {
		ids[i] = s.ID
	}
	return ids
}

// markUpdate returns an update that sets the places of each envelope. One such statement costs a third of one
// statement for each envelope.
func (g sentGroup) markUpdate(part []Sent) mongo.Pipeline {
	places := make([][]outboxes.Place, len(part))
	for i, s := range part {
		places[i] = s.Places
		if places[i] == nil {
			places[i] = []outboxes.Place{}
		}
	}

	index := bson.D{{Key: "$indexOfArray", Value: bson.A{mongodb.Literal(envelopeIDs(part)), "$_id"}}}
	set := bson.D{
		{Key: "sentAt", Value: "$$NOW"},
		{Key: "sent", Value: bson.D{{Key: "$arrayElemAt", Value: bson.A{mongodb.Literal(places), index}}}},
	}
	// With a stamp, the purge finds the envelope by its index.
	if !g.stamped {
		set = append(set, bson.E{Key: "ts", Value: "$$CLUSTER_TIME"})
	}
	return mongo.Pipeline{{{Key: "$set", Value: set}}}
}
