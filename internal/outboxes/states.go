package outboxes

import (
	"context"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/slot"
)

// Place is the place of a record in Kafka, as the field `sent` of its envelope stores it.
type Place struct {
	Topic     string `bson:"topic" json:"topic"`
	Partition int32  `bson:"partition" json:"partition"`
	Offset    int64  `bson:"offset" json:"offset"`
}

// PickedByID is the index hint that prevents the server from using the index on state. A million envelopes may
// share a state.
var PickedByID = bson.D{{Key: "_id", Value: 1}}

// The conditions in this file decide the kind of an envelope. A writer may store null for a field that it does
// not set, so null has to mean the same as a missing field, here and in event.Parse. A condition therefore
// compares with the values that have a meaning, or with null, which matches both. $exists and the type
// "missing" distinguish null from a missing field, so a condition on an envelope must not use them.

// Exceptional lists the values of `state`.
var Exceptional = bson.A{"retry", "blocked", "parked"}

// IsException returns the condition for an exception.
func IsException(and ...bson.E) bson.D {
	return append(bson.D{{Key: "state", Value: bson.D{{Key: "$in", Value: Exceptional}}}}, and...)
}

// isScheduled returns the condition for an envelope that waits for its due time.
func isScheduled(and ...bson.E) bson.D {
	scheduled := bson.D{{Key: "dueAt", Value: bson.D{{Key: "$type", Value: "date"}}}, {Key: "state", Value: nil}}
	return append(scheduled, and...)
}

// Healthy returns the condition for an envelope with neither a state nor a due time. If an envelope has one
// of the two, it is never purged, even if its stamp is old (N25).
func Healthy(and ...bson.E) bson.D {
	return append(and, bson.E{Key: "state", Value: nil}, bson.E{Key: "dueAt", Value: nil})
}

// StillDirty reports whether coll holds an exception or a scheduled envelope of the slot. In a transaction, it
// reads the snapshot of the transaction, so the owner can remove a collection from `dirty` in one fenced
// transaction.
func StillDirty(ctx context.Context, coll *mongo.Collection, p slot.Range) (bool, error) {
	for _, waits := range []bson.D{IsException(), isScheduled()} {
		if found, err := mongodb.Exists(ctx, coll, p.AddFilter(waits)); found || err != nil {
			return found, err
		}
	}
	return false, nil
}
