package letters

import (
	"github.com/outrelay/outrelay/internal/mongodb"
)

// Indexes returns the indexes of the collection of letters. Every query has one: the letters after a position and the
// order of a requeue, the newest letters of all outboxes and of one, the ids of envelopes, keys, and the three conditions
// that select few of many letters. The last one makes the server remove letters that have expired.
func Indexes() []mongodb.Index {
	index := func(name string, fields ...string) mongodb.Index {
		return mongodb.Index{Name: name, Keys: mongodb.Ascending(fields...)}
	}

	return []mongodb.Index{
		index("watcher_1_pos_1__id_1", "watcher", "pos", "_id"),
		index("watcher_1_movedAt_1__id_1", "watcher", "movedAt", "_id"),
		index("watcher_1_ns_1_movedAt_1__id_1", "watcher", "ns", "movedAt", "_id"),
		index("watcher_1_key_1_movedAt_1", "watcher", "key", "movedAt"),
		index("watcher_1_class_1_movedAt_1", "watcher", "class", "movedAt"),
		index("watcher_1_type_1_movedAt_1", "watcher", "type", "movedAt"),
		index("watcher_1_fingerprint_1_movedAt_1", "watcher", "fingerprint", "movedAt"),
		index("id_1_ns_1", "id", "ns"),
		{Name: "expireAt_1", Keys: mongodb.Ascending("expireAt"), TTL: new(int32)},
	}
}
