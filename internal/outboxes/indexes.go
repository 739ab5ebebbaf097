package outboxes

import (
	"context"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/mongodb"
)

// Indexes returns the indexes of every outbox collection. Purge, sweep and replay use ts. The other indexes
// only hold exceptions, so a healthy envelope costs one entry. They end with slot, so that a slot reads only
// its own exceptions (N28). Slot 0 reads all, because no range of an index holds the envelopes without a slot.
func Indexes() []mongodb.Index {
	present := func(field string) bson.D {
		return bson.D{{Key: field, Value: bson.D{{Key: "$exists", Value: true}}}}
	}

	return []mongodb.Index{
		{Name: "ts_1", Keys: mongodb.Ascending("ts")},
		{Name: "dueAt_1_slot_1", Keys: mongodb.Ascending("dueAt", "slot"), Partial: present("dueAt")},
	}
}

// IndexStatements returns the mongosh statements that create all indexes of an outbox collection, for an
// administrator to run if the relay lacks the privilege.
func IndexStatements(db, coll string) []string {
	var out []string
	for _, i := range Indexes() {
		out = append(out, i.Statement(db, coll))
	}
	return out
}

// EnsureIndexes calls [mongodb.EnsureIndexSet] with the indexes of an outbox collection.
func EnsureIndexes(ctx context.Context, coll *mongo.Collection) error {
	return mongodb.EnsureIndexSet(ctx, coll, Indexes())
}

// MissingIndexes returns the indexes of [Indexes] that coll does not have under any name. If the collection
// does not exist, it returns all.
func MissingIndexes(ctx context.Context, coll *mongo.Collection) ([]mongodb.Index, error) {
	return mongodb.MissingIndexes(ctx, coll, Indexes())
}
