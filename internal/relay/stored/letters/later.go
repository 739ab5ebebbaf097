package letters

import (
	"context"
	"fmt"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/contract/slot"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/relay/stored/outboxes"
	"github.com/outrelay/outrelay/resume"
)

// Mark is what an owner needs of a letter, in order not to send the event again.
type Mark struct {
	NS       string         `bson:"ns"`
	ID       bson.RawValue  `bson:"id"` // of the envelope, see [ShortID]
	Delivery int32          `bson:"delivery"`
	Pos      string         `bson:"pos"`     // see [ShortPos]
	Stamp    bson.Timestamp `bson:"stamp"`   // of the insert of the envelope; zero if there is none
	Topic    string         `bson:"topic"`   // the topic that rejected the envelope, or "" if no single topic did
	MovedAt  time.Time      `bson:"movedAt"` // server time
	Requeued bool           `bson:"requeued"`
	Digest   []byte         `bson:"digest"` // see [DigestOf]
}

var markFields = append(mongodb.Fields("ns", "id", "delivery", "pos", "stamp", "topic", "movedAt", "digest"),
	bson.E{Key: "requeued", Value: bson.D{{Key: "$gt", Value: bson.A{"$requeued", nil}}}})

// clockSlack is how far the cluster time may be ahead of the clock of a server.
const clockSlack = 10 * time.Second

// afterPosition returns the filter for the letters whose events a stream from a position contains.
// It leaves out letters of later deliveries: a requeued envelope is not delivered by the stream.
//
// The position of a swept envelope does not show when the envelope was committed. A letter that was
// moved before the time of the position is of an earlier commit.
func afterPosition(watcher string, part slot.Range, position resume.Position) bson.D {
	at, _ := position.Time()
	// The letter of a swept envelope has no position in the stream, so its time counts.
	isSwept := bson.D{{Key: "$regexMatch", Value: bson.D{
		{Key: "input", Value: "$pos"},
		{Key: "regex", Value: outboxes.SweptPattern},
	}}}

	// Each branch repeats the watcher, so that it has an index of its own.
	return part.AddFilter(bson.D{{Key: "$or", Value: bson.A{
		bson.D{
			{Key: "watcher", Value: watcher},
			{Key: "delivery", Value: 0},
			{Key: "pos", Value: bson.D{{Key: "$gt", Value: ShortPos(outboxes.PosOf(position))}}},
		},
		bson.D{
			{Key: "watcher", Value: watcher},
			{Key: "delivery", Value: 0},
			{Key: "movedAt", Value: bson.D{{Key: "$gt", Value: time.Unix(int64(at.T), 0).Add(-clockSlack)}}},
			{Key: "$expr", Value: isSwept},
		},
	}}})
}

// Later calls take for each letter of the slot whose event comes after position, in no
// particular order. An owner that reads the stream from that position must not send these events
// (N15).
//
// Later sees every letter that was committed before the call. It holds one response of the server
// in memory. It returns the first error of take.
func Later(
	ctx context.Context, coll *mongo.Collection, watcher string, part slot.Range, position resume.Position,
	take func(Mark) error,
) error {
	doing := "finding dead letters after the position in " + mongodb.Namespace(coll)
	return eachMark(ctx, coll, doing, afterPosition(watcher, part, position), take)
}

// Known calls take for each letter of the envelopes with these ids in the outbox ns, in no particular order: a sweep must
// not send to a topic that has rejected the envelope. Stamp distinguishes the envelope from another one with its id. The
// ids may be those of envelopes or those of [ShortID].
//
// Known sees every letter that was committed before the call. It returns the first error of take.
func Known(
	ctx context.Context, coll *mongo.Collection, watcher, ns string, ids []bson.RawValue, take func(Mark) error,
) error {
	if len(ids) == 0 {
		return nil
	}
	doing := "finding dead letters of " + ns + " in " + mongodb.Namespace(coll)
	return eachMark(ctx, coll, doing, bson.D{
		{Key: "id", Value: bson.D{{Key: "$in", Value: shortIDs(ids)}}},
		{Key: "ns", Value: ns},
		{Key: "watcher", Value: watcher},
	}, take)
}

// Each calls take for each letter of a first delivery of the watcher, in no particular order.
func Each(ctx context.Context, coll *mongo.Collection, watcher string, take func(Mark) error) error {
	doing := "reading the dead letters in " + mongodb.Namespace(coll)
	return eachMark(ctx, coll, doing, bson.D{{Key: "watcher", Value: watcher}, {Key: "delivery", Value: 0}}, take)
}

// shortIDs returns the ids as letters store them. Nil stays nil.
func shortIDs(ids []bson.RawValue) []bson.RawValue {
	if ids == nil {
		return nil
	}
	short := make([]bson.RawValue, len(ids))
	for i, id := range ids {
		short[i] = ShortID(id)
	}
	return short
}

func eachMark(ctx context.Context, coll *mongo.Collection, doing string, filter bson.D, take func(Mark) error) error {
	// A majority read alone may miss a letter that was committed just before (N22).
	return mongodb.AfterCommitted(ctx, coll, func(ctx context.Context) error {
		return mongodb.FindEach(ctx, mongodb.Majority(coll), doing, filter, func(raw bson.Raw) error {
			var mark Mark
			if err := bson.Unmarshal(raw, &mark); err != nil {
				return fmt.Errorf("decoding a dead letter of %s: %w", mongodb.Namespace(coll), err)
			}
			return take(mark)
		}, options.Find().SetBatchSize(5000).SetProjection(markFields))
	})
}
