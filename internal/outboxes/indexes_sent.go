package outboxes

import (
	"context"
	"math"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/schema"
)

// SentIndexName is the name of the index by which the server removes marked envelopes.
const SentIndexName = "sentAt_1"

// SentIndex returns the TTL index on the time of delivery. It leaves out envelopes with a state or a due time,
// so that the server does not delete an envelope that is to be sent again. With the index, a mark costs four
// times as much, so outrelay creates it only on request.
func SentIndex(ttl time.Duration) mongodb.Index {
	// Seconds are rounded up, so that the server never deletes too early.
	seconds := int32(min((ttl+time.Second-1)/time.Second, math.MaxInt32))
	return mongodb.Index{Name: SentIndexName, Keys: mongodb.Ascending("sentAt"), TTL: &seconds, Partial: bson.D{
		{Key: "sentAt", Value: bson.D{{Key: "$exists", Value: true}}},
		{Key: "state", Value: nil},
		{Key: "dueAt", Value: nil},
	}}
}

// EnsureSentTTL makes the server remove marked envelopes when ttl has passed since their delivery. If the index
// has another TTL, EnsureSentTTL changes it. If ttl is 0, it removes the index. changed reports whether it
// changed anything.
//
// A TTL works without an owner and counts from the delivery, but the purge counts from the commit. In
// exchange, the server deletes all due envelopes once a minute, at once and without a rate limit. It does so
// even during the sweep of a gap or while the watcher is paused, and it uses its own clock. It removes marked
// envelopes only, so the purge still removes the others.
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
			return coll.Database().RunCommand(ctx, bson.D{
				{Key: "collMod", Value: coll.Name()},
				{Key: "index", Value: bson.D{
					{Key: "name", Value: SentIndexName}, {Key: "expireAfterSeconds", Value: want},
				}},
			}).Err()
		})
		if err != nil {
			ns := mongodb.Namespace(coll)
			return false, mongodb.Refusal(err, "changing the TTL of "+ns, "collMod", ns)
		}
		return true, nil

	case found:
		// The index has no TTL. Before MongoDB 5.1, no command can add one to it.
		if _, err := mongodb.DropIndexNamed(ctx, coll, SentIndexName); err != nil {
			return false, err
		}
	}
	return true, mongodb.CreateIndexes(ctx, coll, []mongodb.Index{index})
}

// SentIndexOf returns the TTL of the index in seconds, or 0 if it has none. found reports whether the index
// exists.
func SentIndexOf(ctx context.Context, coll *mongo.Collection) (ttl int64, found bool, err error) {
	found, seconds, err := mongodb.FindIndexTTL(ctx, coll, SentIndexName)
	return int64(seconds), found, err
}
