package outboxes

import (
	"context"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/mongodb"
)

// Indexes are those of every outbox collection: ts for purge, sweep and replay; the others only hold exceptions, so a
// healthy envelope pays for one entry. They end with slot, so that a slot fetches its own exceptions
// only (N28). Slot 0 fetches all: no range of an index holds whatever has no slot.
func Indexes() []mongodb.Index {
	present := func(field string) bson.D {
		return bson.D{{Key: field, Value: bson.D{{Key: "$exists", Value: true}}}}
	}
	return []mongodb.Index{
		{Name: "ts_1", Keys: mongodb.Ascending("ts")},
		{Name: "dueAt_1_slot_1", Keys: mongodb.Ascending("dueAt", "slot"), Partial: present("dueAt")},
		{Name: "nextAt_1_slot_1", Keys: mongodb.Ascending("nextAt", "slot"), Partial: present("nextAt")},
		{Name: "state_1_key_1_pos_1_slot_1", Keys: mongodb.Ascending("state", "key", "pos", "slot"), Partial: present("state")},
		// What a replay has queued and the relay has not sent yet: a replay waits while it is much.
		{Name: mongodb.ReplayIndex, Keys: mongodb.Ascending("origin", "replayOf"), Partial: bson.D{{Key: "origin", Value: OriginReplay}}},
	}
}

// IndexStatements are the statements for all indexes of an outbox collection, for people without the relay's privileges.
func IndexStatements(db, coll string) []string {
	var out []string
	for _, i := range Indexes() {
		out = append(out, i.Statement(db, coll))
	}
	return out
}

// EnsureIndexes is [mongodb.EnsureIndexSet] with the indexes of an outbox collection.
func EnsureIndexes(ctx context.Context, coll *mongo.Collection) error {
	return mongodb.EnsureIndexSet(ctx, coll, Indexes())
}

// MissingIndexes are those of [Indexes] that coll does not have, whatever the names of those it has. A collection that
// does not exist misses all.
func MissingIndexes(ctx context.Context, coll *mongo.Collection) ([]mongodb.Index, error) {
	return mongodb.MissingIndexes(ctx, coll, Indexes())
}
