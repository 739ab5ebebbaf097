package outboxes

import (
	"context"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/contract/envelope"
	"github.com/outrelay/outrelay/internal/contract/slot"
	"github.com/outrelay/outrelay/internal/mongodb"
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

// WithoutDueAt returns the condition for an envelope that the stream may have sent: one without any value in dueAt. An envelope with
// one is never purged, even if its stamp is old and the value is no date (N25).
func WithoutDueAt(and ...bson.E) bson.D {
	return append(and, bson.E{Key: "dueAt", Value: nil})
}

// HasScheduled reports whether coll holds a scheduled envelope of the slot.
func HasScheduled(ctx context.Context, coll *mongo.Collection, slot slot.Range) (bool, error) {
	return mongodb.Exists(ctx, coll, slot.AddFilter(bson.D{envelope.Scheduled()}))
}
