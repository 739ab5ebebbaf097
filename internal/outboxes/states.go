package outboxes

import (
	"context"
	"errors"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/slot"
)

// PickedByID keeps the server from going by the state, which a million may share.
var PickedByID = bson.D{{Key: "_id", Value: 1}}

// The conditions in this file decide what an envelope is. A writer may store null for a field that it does not set, so null has to mean
// the same as a missing field, here as in event.Parse: a condition compares with the values that mean something, or with null, which
// matches both. $exists and the type "missing" tell the two apart, and have no place in a condition on an envelope.

// Exceptional are the values of `state`.
var Exceptional = bson.A{"retry", "blocked", "parked"}

// IsException is the condition for an exception.
func IsException(and ...bson.E) bson.D {
	return append(bson.D{{Key: "state", Value: bson.D{{Key: "$in", Value: Exceptional}}}}, and...)
}

// IsScheduled is the condition for an envelope that waits for its time.
func IsScheduled(and ...bson.E) bson.D {
	return append(bson.D{{Key: "dueAt", Value: bson.D{{Key: "$type", Value: "date"}}}, {Key: "state", Value: nil}}, and...)
}

// Healthy is the condition for an envelope whose fate is not written on it: one with a state or a due time is never
// purged, whatever its stamp (N25).
func Healthy(and ...bson.E) bson.D {
	return append(and, bson.E{Key: "state", Value: nil}, bson.E{Key: "dueAt", Value: nil})
}

// StillDirty reports whether coll holds an exception or a scheduled envelope of that slot. In a transaction it sees what that sees, so
// the owner can take a collection off `dirty` in one fenced transaction.
func StillDirty(ctx context.Context, coll *mongo.Collection, p slot.Range) (bool, error) {
	for _, waits := range []bson.D{IsException(), IsScheduled()} {
		err := coll.FindOne(ctx, p.AddFilter(waits), options.FindOne().SetProjection(bson.D{{Key: "_id", Value: 1}})).Err()
		if err == nil {
			return true, nil
		}
		if !errors.Is(err, mongo.ErrNoDocuments) {
			return false, mongodb.DescribeRefusal(err, "looking for exceptions in "+mongodb.Namespace(coll), "find", mongodb.Namespace(coll), "")
		}
	}
	return false, nil
}
