package purge

import (
	"context"
	"fmt"
	"strings"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/mongodb"
)

// The ways of recording a delivery, as the configuration names them.
const (
	RecordWatermark = "watermark" // nothing per envelope, but those without a stamp are marked
	RecordDelete    = "delete"
	RecordMark      = "mark"
)

// Bounds of one fenced transaction (N3).
const (
	maxFencedDocs  = 1000
	maxFencedBytes = 8 << 20
)

// markGroup is how many envelopes one update statement marks. It finds each one's positions by searching a list of so
// many ids, so a longer list costs more than it saves in statements.
const markGroup = 50

// Position is where a record stands.
type Position struct {
	Topic     string `bson:"topic" json:"topic"`
	Partition int32  `bson:"partition" json:"partition"`
	Offset    int64  `bson:"offset" json:"offset"`
}

// Sent is an envelope that was delivered to all of its targets.
type Sent struct {
	NS string
	ID bson.RawValue
	// TS is the stamp, or zero for an envelope without one, and for one whose stamp is older than its event by more than
	// the margin: it was copied here, and its stamp says nothing about it (N25). Such an envelope gets a stamp when it is
	// marked, by which it is purged, whatever stood in its place.
	TS        bson.Timestamp
	Positions []Position
}

func (s *Sent) size() int {
	n := 64 + len(s.ID.Value)
	for _, p := range s.Positions {
		n += 64 + len(p.Topic)
	}
	return n
}

// RecordSent writes down that envelopes were delivered, in as many fenced transactions as their number asks for: it marks
// them with the server's time and their positions, or deletes them, or for [RecordWatermark] marks those without a stamp,
// because no purge could tell by a stamp that they were delivered.
//
// An envelope that has become an exception since, or that was replaced by a newer one of its id, is left alone (N25), and
// one that is gone is no error; so the same call may be made again. It returns when the majority has all of it. The
// tickets of the envelopes should be resolved after that: what a checkpoint has passed is not recorded any more after a
// crash.
func RecordSent(ctx context.Context, f mongodb.Fencer, mode string, list []Sent) error {
	if mode == RecordWatermark {
		list = unstampedOnly(list)
	}
	err := mongodb.WriteInParts(ctx, f, list, mongodb.Parts[Sent]{Top: maxFencedDocs, Fits: fits, Write: func(tx context.Context, c *mongo.Client, part []Sent) error {
		for _, g := range byNamespace(part) {
			if err := g.record(tx, c, mode); err != nil {
				return err
			}
		}
		return nil
	}})
	if err != nil {
		return fmt.Errorf("recording %d deliveries: %w", len(list), err)
	}
	return nil
}

func unstampedOnly(list []Sent) []Sent {
	var out []Sent
	for _, s := range list {
		if s.TS.IsZero() {
			out = append(out, s)
		}
	}
	return out
}

// fits is how many, at least one and at most limit, go into one transaction.
func fits(list []Sent, limit int) int {
	bytes := 0
	for i := range list {
		if bytes += list[i].size(); i == limit || i > 0 && bytes > maxFencedBytes {
			return i
		}
	}
	return len(list)
}

// delivered are the envelopes of one transaction that one filter fits: of one collection, all with a stamp or all without.
type delivered struct {
	ns      string
	stamped bool
	sent    []Sent
}

func byNamespace(part []Sent) []*delivered {
	type key struct {
		ns      string
		stamped bool
	}
	var order []*delivered
	groups := make(map[key]*delivered)
	for _, s := range part {
		k := key{s.NS, !s.TS.IsZero()}
		g := groups[k]
		if g == nil {
			g = &delivered{ns: s.NS, stamped: k.stamped}
			groups[k] = g
			order = append(order, g)
		}
		g.sent = append(g.sent, s)
	}
	return order
}

func (g *delivered) record(tx context.Context, client *mongo.Client, mode string) error {
	db, coll, ok := strings.Cut(g.ns, ".")
	if !ok {
		return fmt.Errorf("recording in %q: that is no collection", g.ns)
	}
	c := client.Database(db).Collection(coll)
	if mode == RecordDelete {
		if _, err := c.DeleteMany(tx, g.filter(g.sent), options.DeleteMany().SetHint(byID)); err != nil {
			return mongodb.DescribeRefusal(err, "deleting what was sent of "+g.ns, "remove", g.ns, "")
		}
		return nil
	}
	var updates []mongo.WriteModel
	for rest := g.sent; len(rest) > 0; {
		part := rest[:min(markGroup, len(rest))]
		rest = rest[len(part):]
		updates = append(updates, mongo.NewUpdateManyModel().SetFilter(g.filter(part)).SetUpdate(g.mark(part)).SetHint(byID))
	}
	if _, err := c.BulkWrite(tx, updates, options.BulkWrite().SetOrdered(false)); err != nil {
		return mongodb.DescribeRefusal(err, "marking what was sent of "+g.ns, "find and update", g.ns, "")
	}
	return nil
}

// filter is N25's: by id, without a state, and no newer than what was sent.
func (g *delivered) filter(part []Sent) bson.D {
	f := bson.D{{Key: "_id", Value: bson.D{{Key: "$in", Value: ids(part)}}}, {Key: "state", Value: nil}}
	if g.stamped {
		highest := part[0].TS
		for _, s := range part[1:] {
			if s.TS.After(highest) {
				highest = s.TS
			}
		}
		f = append(f, bson.E{Key: "ts", Value: bson.D{{Key: "$lte", Value: highest}}})
	}
	return f
}

// byID keeps the planner from trying the range of ts.
var byID = bson.D{{Key: "_id", Value: 1}}

func ids(part []Sent) []bson.RawValue {
	out := make([]bson.RawValue, len(part))
	for i, s := range part {
		out[i] = s.ID
	}
	return out
}

// mark sets each envelope's own positions in one statement, for a third of what a statement for each would cost.
func (g *delivered) mark(part []Sent) mongo.Pipeline {
	positions := make([][]Position, len(part))
	for i, s := range part {
		positions[i] = s.Positions
		if positions[i] == nil {
			positions[i] = []Position{}
		}
	}
	mine := bson.D{{Key: "$indexOfArray", Value: bson.A{mongodb.Literal(ids(part)), "$_id"}}}
	set := bson.D{
		{Key: "sentAt", Value: "$$NOW"},
		{Key: "sent", Value: bson.D{{Key: "$arrayElemAt", Value: bson.A{mongodb.Literal(positions), mine}}}},
	}
	if !g.stamped {
		set = append(set, bson.E{Key: "ts", Value: "$$CLUSTER_TIME"})
	}
	return mongo.Pipeline{{{Key: "$set", Value: set}}}
}
