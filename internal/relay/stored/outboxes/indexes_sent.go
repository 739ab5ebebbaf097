package outboxes

import (
	"context"
	"math"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/mongodb"
)

// SentIndexName is the name of the index by which the server removes marked envelopes.
const SentIndexName = "sentAt_1"

// sentIndex returns the index on the time of delivery, with a TTL unless ttl is 0. It leaves out envelopes with a due time,
// which are to be sent again. With the index, a mark costs four times as much, so outrelay creates it only on request.
func sentIndex(ttl time.Duration) mongodb.Index {
	index := mongodb.Index{Name: SentIndexName, Keys: mongodb.Ascending("sentAt"), Partial: bson.D{
		{Key: "sentAt", Value: bson.D{{Key: "$exists", Value: true}}},
		// A service may store fields sentAt and sent too, so a mark needs a place, as in envelope.Undelivered. Marks without a place, which no
		// such condition distinguishes from an empty list of a service, are left to the purge.
		{Key: "sent.topic", Value: bson.D{{Key: "$type", Value: "string"}}},
		{Key: "sent.offset", Value: bson.D{{Key: "$type", Value: "number"}}},
		{Key: "dueAt", Value: nil},
	}}
	if ttl > 0 {
		// Seconds are rounded up, so that the server never deletes too early.
		seconds := int32(min((ttl+time.Second-1)/time.Second, math.MaxInt32))
		index.TTL = &seconds
	}
	return index
}

// EnsureSentTTL makes the server remove marked envelopes when ttl has passed since their delivery. If the index
// has another TTL, EnsureSentTTL changes it. If ttl is 0, it removes the index; without the privilege to look for one,
// it does nothing. changed reports whether it changed anything. An index of services stays; if it has the name, the error is
// [mongodb.ErrIndexConflict] unless ttl is 0. If the collection was dropped, the error is [mongodb.ErrCollectionGone].
//
// A TTL works without an owner and counts from the delivery, but the purge counts from the commit. In
// exchange, the server deletes all due envelopes once a minute, at once and without a rate limit. It does so
// even during the sweep of a gap or while the watcher is paused, and it uses its own clock. It removes envelopes
// whose mark has a place only, so the purge still removes the others.
func EnsureSentTTL(ctx context.Context, client *mongo.Client, outbox Outbox, ttl time.Duration) (changed bool, err error) {
	coll := mongodb.Database(client, outbox.DB).Collection(outbox.Coll)
	changed, err = mongodb.EnsureTTLIn(ctx, coll, outbox.UUID, sentIndex(ttl))
	if ttl == 0 && mongodb.HasCode(err, mongodb.CodeUnauthorized) {
		return false, nil
	}
	return changed, err
}
