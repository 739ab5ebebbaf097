package ledger

import (
	"context"
	"errors"
	"slices"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/contract/envelope"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/relay/stored/outboxes"
	"github.com/outrelay/outrelay/internal/relay/stored/waiting"
)

// The ways to record a delivery, as in the configuration.
const (
	RecordPosition = "position" // writes nothing
	RecordDelete   = "delete"
	RecordMark     = "mark"
)

const (
	// markGroup is how many envelopes one update statement marks. The statement finds the places of each envelope by a
	// search in a list of so many ids. A longer list costs more than it saves in statements.
	markGroup = 50
	// If an outbox rejects maxRejections deliveries, no others of it are recorded until recordingPause has passed since the first
	// one. Otherwise each envelope would cost a transaction, and the resolved position would wait for it.
	maxRejections  = 4
	recordingPause = time.Minute
)

// rejections counts the deliveries that an outbox rejected.
type rejections struct {
	since time.Time
	n     int
}

// isPaused reports whether the deliveries of an outbox are not recorded at present.
func (l *Ledger) isPaused(ns string) bool {
	rejections, rejected := l.rejections[ns]
	if rejected && time.Since(rejections.since) >= recordingPause {
		delete(l.rejections, ns)
	}
	return l.rejections[ns].n >= maxRejections
}

// noteRejection counts a delivery that the outbox ns rejected.
func (l *Ledger) noteRejection(ns string) {
	rejections := l.rejections[ns]
	if rejections.n == 0 {
		rejections.since = time.Now()
	}
	rejections.n++
	l.rejections[ns] = rejections
}

// recordDeliveries records the deliveries of a part on the documents of their outboxes, in a fenced transaction of its own. If an
// outbox rejects one, it stays unrecorded: the envelope was delivered, and the resolved position must not wait for a write that cannot
// succeed.
func (l *Ledger) recordDeliveries(ctx context.Context, part []*Outcome) error {
	return l.recordEnds(ctx, part, func(outcome *Outcome) bool { return outcome.End == Sent && !outcome.DeadTargets })
}

// deleteUnsent deletes the envelopes of a part that will never be sent from outboxes that are to stay empty. Their letters are stored.
func (l *Ledger) deleteUnsent(ctx context.Context, part []*Outcome) error {
	if l.config.Recording != RecordDelete {
		return nil
	}
	return l.recordEnds(ctx, part, func(outcome *Outcome) bool {
		return outcome.End == Dead || outcome.End == Dropped || outcome.End == Sent && outcome.DeadTargets
	})
}

// recordEnds records those outcomes of a part on the documents of their outboxes whose end is final.
func (l *Ledger) recordEnds(ctx context.Context, part []*Outcome, isFinal func(outcome *Outcome) bool) error {
	byOutbox := map[string][]*Outcome{}
	for _, o := range part {
		// The claim has taken a scheduled envelope out of its outbox already.
		taken := o.originOf() == waiting.OriginScheduled && l.config.Recording == RecordDelete
		// An envelope that still waits for some topics is not deleted.
		keeps := o.Partial && l.config.Recording == RecordDelete
		if o.Recorded && isFinal(o) && !taken && !keeps {
			ns := o.namespace()
			byOutbox[ns] = append(byOutbox[ns], o)
		}
	}

	for ns, list := range byOutbox {
		if err := l.recordInOutbox(ctx, ns, list); err != nil {
			return err
		}
	}
	return nil
}

// recordKind selects the deliveries that one statement records.
type recordKind struct {
	stamped bool // their envelopes have a stamp
	partial bool // their envelopes wait for further topics
}

// recordInOutbox records deliveries of one outbox, in smaller parts if MongoDB rejects some or is too slow.
func (l *Ledger) recordInOutbox(ctx context.Context, ns string, list []*Outcome) error {
	if l.isPaused(ns) {
		return nil
	}

	var rejected error
	err := l.repeatUntilDone(ctx, func(ctx context.Context) error {
		rejected = nil
		err := l.config.Fencer.Fenced(ctx, nil, mongodb.LimitRuns(func(tx context.Context) error {
			coll := outboxes.CollectionOf(mongo.SessionFromContext(tx).Client(), ns)
			for _, kind := range []recordKind{{stamped: true}, {}, {stamped: true, partial: true}, {partial: true}} {
				if err := l.writeRecords(tx, coll, kind, list); err != nil {
					return err
				}
			}
			return nil
		}))
		// The user may write to other outboxes.
		if errors.Is(err, mongodb.ErrSlow) || mongodb.IsRejection(err) || mongodb.HasCode(err, mongodb.CodeUnauthorized) {
			rejected = err
			return nil
		}
		return err
	})
	if err != nil || rejected == nil {
		return err
	}

	if len(list) == 1 {
		l.noteRejection(ns)
		l.config.Log.Error("cannot record deliveries; they were sent, and stay unmarked in the outbox",
			"collection", ns, "again_in", recordingPause, "error", rejected,
			"fix", "allow the field sentAt in the validator, and updates to the relay's user; let services end transactions that lock delivered envelopes")
		return nil
	}
	half := len(list) / 2
	if err := l.recordInOutbox(ctx, ns, list[:half]); err != nil {
		return err
	}
	return l.recordInOutbox(ctx, ns, list[half:])
}

// writeRecords deletes or marks the envelopes of list that are of a kind. It does not change an envelope that was replaced by a newer one
// with its id (N25). A missing envelope is not an error.
func (l *Ledger) writeRecords(tx context.Context, coll *mongo.Collection, kind recordKind, list []*Outcome) error {
	list = slices.DeleteFunc(slices.Clone(list), func(outcome *Outcome) bool {
		return recordKind{!outcome.Stamp.IsZero(), outcome.Partial} != kind
	})
	if len(list) == 0 {
		return nil
	}

	ns := mongodb.Namespace(coll)
	if l.config.Recording == RecordDelete {
		_, err := coll.DeleteMany(tx, filterUnchanged(list, kind.stamped), options.DeleteMany().SetHint(outboxes.PickedByID))
		return mongodb.DescribeError(err, "deleting delivered envelopes of "+ns, "remove", ns)
	}

	var updates []mongo.WriteModel
	for part := range slices.Chunk(list, markGroup) {
		updates = append(updates, mongo.NewUpdateManyModel().SetFilter(filterUnchanged(part, kind.stamped)).
			SetUpdate(markUpdate(part, kind)).SetHint(outboxes.PickedByID))
	}
	_, err := coll.BulkWrite(tx, updates, options.BulkWrite().SetOrdered(false))
	return mongodb.DescribeError(err, "marking delivered envelopes of "+ns, "find and update", ns)
}

// filterUnchanged returns the filter of N25: by id, not scheduled, and no newer than the newest of part.
func filterUnchanged(part []*Outcome, stamped bool) bson.D {
	filter := outboxes.WithoutDueAt(bson.E{Key: "_id", Value: bson.D{{Key: "$in", Value: envelopeIDs(part)}}})
	if !stamped {
		return filter
	}

	// An envelope that was inserted again with this id has a later stamp, and was not sent by this delivery.
	newest := part[0].Stamp
	for _, o := range part[1:] {
		if o.Stamp.After(newest) {
			newest = o.Stamp
		}
	}
	return append(filter, envelope.Stamped(bson.E{Key: "$lte", Value: newest}))
}

func envelopeIDs(part []*Outcome) []bson.RawValue {
	ids := make([]bson.RawValue, len(part))
	for i, o := range part {
		ids[i] = o.envelopeID()
	}
	return ids
}

// markUpdate returns an update that adds the places of each envelope to the places that earlier deliveries to other topics have recorded. Only
// the last one sets the time. One such statement costs a third of one statement for each envelope.
func markUpdate(part []*Outcome, kind recordKind) mongo.Pipeline {
	places := make([][]outboxes.Place, len(part))
	for i, o := range part {
		places[i] = o.Sent
		if o.Doc != nil {
			places[i] = slices.Concat(o.Doc.Sent, o.Sent)
		}
		if places[i] == nil {
			places[i] = []outboxes.Place{}
		}
	}

	index := bson.D{{Key: "$indexOfArray", Value: bson.A{mongodb.Literal(envelopeIDs(part)), "$_id"}}}
	added := bson.D{{Key: "$arrayElemAt", Value: bson.A{mongodb.Literal(places), index}}}
	// A service may store a field of this name, too.
	before := bson.D{{Key: "$filter", Value: bson.D{
		{Key: "input", Value: bson.D{{Key: "$cond", Value: bson.A{bson.D{{Key: "$isArray", Value: "$sent"}}, "$sent", bson.A{}}}}},
		{Key: "cond", Value: bson.D{{Key: "$and", Value: bson.A{
			bson.D{{Key: "$eq", Value: bson.A{bson.D{{Key: "$type", Value: "$$this.topic"}}, "string"}}},
			bson.D{{Key: "$isNumber", Value: "$$this.offset"}},
		}}}},
	}}}
	set := bson.D{{Key: "sent", Value: bson.D{{Key: "$setUnion", Value: bson.A{before, added}}}}}
	if kind.partial {
		return mongo.Pipeline{{{Key: "$set", Value: set}}}
	}

	set = append(set, bson.E{Key: "sentAt", Value: "$$NOW"})
	// With a stamp, the purge finds the envelope by its index.
	if !kind.stamped {
		set = append(set, bson.E{Key: "ts", Value: "$$CLUSTER_TIME"})
	}
	return mongo.Pipeline{{{Key: "$set", Value: set}}}
}
