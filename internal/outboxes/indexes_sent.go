package outboxes

import (
	"context"
	"fmt"
	"math"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/schema"
)

// SentIndexName is the index by which the server removes marked envelopes.
const SentIndexName = "sentAt_1"

// SentIndex is the TTL index on the time of delivery. Envelopes with a state or a due time are not in it, so that one that
// is on its way again is not taken away. It makes a mark cost four times as much, so it is there only when asked for.
func SentIndex(ttl time.Duration) mongodb.Index {
	seconds := int32(min((ttl+time.Second-1)/time.Second, math.MaxInt32))
	return mongodb.Index{Name: SentIndexName, Keys: mongodb.Ascending("sentAt"), TTL: &seconds, Partial: bson.D{
		{Key: "sentAt", Value: bson.D{{Key: "$exists", Value: true}}},
		{Key: "state", Value: nil},
		{Key: "dueAt", Value: nil},
	}}
}

// EnsureSentTTL lets the server remove marked envelopes that long after their delivery; 0 takes the TTL away again, and one
// that is there is changed. changed says whether anything was done.
//
// A TTL works without an owner and counts from the delivery, where the purge counts from the commit. In exchange the server
// deletes once a minute whatever is due, in one go and without a limit of its rate, also while a gap is swept or the watcher
// is paused, and reads its own clock. It takes marked envelopes only: with it the purge still has the rest.
func EnsureSentTTL(ctx context.Context, coll *mongo.Collection, ttl time.Duration) (changed bool, err error) {
	have, found, err := SentIndexOf(ctx, coll)
	if err != nil {
		return false, err
	}
	if ttl <= 0 {
		if !found {
			return false, nil
		}
		return mongodb.DropIndexNamed(ctx, coll, SentIndexName)
	}
	index := SentIndex(ttl)
	switch want := int64(*index.TTL); {
	case found && have == want:
		return false, nil
	case found && have > 0:
		err = schema.Change(ctx, coll, func(ctx context.Context) error {
			return coll.Database().RunCommand(ctx, bson.D{{Key: "collMod", Value: coll.Name()}, {Key: "index", Value: bson.D{
				{Key: "name", Value: SentIndexName}, {Key: "expireAfterSeconds", Value: want},
			}}}).Err()
		})
		if err != nil {
			return false, mongodb.DescribeRefusal(err, "changing the TTL of "+mongodb.Namespace(coll), "collMod", mongodb.Namespace(coll), "")
		}
		return true, nil
	case found: // an index without a TTL, which no command before 5.1 gives it
		if _, err := mongodb.DropIndexNamed(ctx, coll, SentIndexName); err != nil {
			return false, err
		}
	}
	return true, mongodb.CreateIndexes(ctx, coll, []mongodb.Index{index})
}

// SentIndexOf is the TTL of the index in seconds, 0 for none, and whether the index is there.
func SentIndexOf(ctx context.Context, coll *mongo.Collection) (ttl int64, found bool, err error) {
	cur, err := coll.Indexes().List(ctx)
	if mongodb.HasCode(err, mongodb.CodeNamespaceNotFound) {
		return 0, false, nil
	}
	if err != nil {
		return 0, false, mongodb.DescribeRefusal(err, "listing indexes of "+mongodb.Namespace(coll), "listIndexes", mongodb.Namespace(coll), "")
	}
	var have []struct {
		Name string        `bson:"name"`
		TTL  bson.RawValue `bson:"expireAfterSeconds"`
	}
	if err := cur.All(ctx, &have); err != nil {
		return 0, false, fmt.Errorf("listing indexes of %s: %w", mongodb.Namespace(coll), err)
	}
	for _, h := range have {
		if h.Name == SentIndexName {
			ttl, _ = h.TTL.AsInt64OK()
			return ttl, true, nil
		}
	}
	return 0, false, nil
}
