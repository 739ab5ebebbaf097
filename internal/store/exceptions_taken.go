package store

import (
	"context"
	"fmt"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/slot"
)

// EachTaken hands what an earlier owner may have sent outside of the stream's order to take, in no order: the exceptions of
// coll, and its scheduled envelopes that are due by until and bear a claim. The envelopes come without their headers, and
// with a payload of null: what matters is where they go and by what they are known. The bytes are valid during the call
// only. It sees everything that was committed before the call. It holds one reply in memory.
func EachTaken(ctx context.Context, coll *mongo.Collection, p slot.Part, until time.Time, take func(bson.Raw) error) error {
	for _, filter := range []bson.D{ // in this order: a claimed one may become an exception meanwhile, never the other way round
		{{Key: "dueAt", Value: bson.D{{Key: "$lte", Value: bson.NewDateTimeFromTime(until)}}}, {Key: "state", Value: nil}, {Key: "claim.token", Value: bson.D{{Key: "$ne", Value: nil}}}},
		isException(),
	} {
		if err := each(ctx, coll, p.And(filter), take); err != nil {
			return fmt.Errorf("reading what an earlier owner may have sent of %s: %w", Namespace(coll), err)
		}
	}
	return nil
}

// EachOf hands those of ids that are there to take, as [EachTaken] does, whatever has become of them.
func EachOf(ctx context.Context, coll *mongo.Collection, ids []bson.RawValue, take func(bson.Raw) error) error {
	err := each(ctx, coll, bson.D{{Key: "_id", Value: bson.D{{Key: "$in", Value: ids}}}}, take)
	if err != nil {
		return fmt.Errorf("looking again at what an earlier owner may have sent of %s: %w", Namespace(coll), err)
	}
	return nil
}

func each(ctx context.Context, coll *mongo.Collection, filter bson.D, take func(bson.Raw) error) error {
	project := bson.D{{Key: "$unset", Value: bson.A{"headers", "history", "lastError"}}}
	null := bson.D{{Key: "$set", Value: bson.D{{Key: "payload", Value: nil}}}}
	return caughtUp(ctx, coll, func(ctx context.Context) error {
		cur, err := Majority(coll).Aggregate(ctx, mongo.Pipeline{{{Key: "$match", Value: filter}}, project, null}, options.Aggregate().SetBatchSize(1000))
		if err != nil {
			return privilege(err, "reading exceptions of "+Namespace(coll), "find", Namespace(coll), "")
		}
		return walk(ctx, cur, "reading exceptions of "+Namespace(coll), take)
	})
}
