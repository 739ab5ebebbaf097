package state

import (
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/relay/stored/letters"
	"github.com/outrelay/outrelay/internal/relay/stored/waiting"
)

// Collection declares one collection of the state database. It has the simple collation, because positions are
// compared as bytes.
type Collection struct {
	Name string // without the prefix
	// Indexes are all that the queries need, in addition to the one of _id: no query scans the collection.
	Indexes []mongodb.Index
}

// month is how long the server keeps entries of the audit log and finished replays, in seconds.
var month = int32(30 * 24 * 60 * 60)

// Table returns all collections of the state database except the marker. A collection that is not listed is
// neither created nor protected from a stranger's collection of its name.
func Table() []Collection {
	return []Collection{
		// Package lease: leases and positions. Read by ids and by the prefix of ids.
		{Name: "watchers"},

		// Package slots: the number of slots of each watcher. Read by id.
		{Name: "slots"},

		// Package outboxes: the registry. Read by the UUID, by the watcher, and as a whole.
		{Name: "collections", Indexes: []mongodb.Index{
			{Name: "watcher_1_ns_1", Keys: mongodb.Ascending("watcher", "ns")},
		}},

		// Package nodes: heartbeats, the audit log, and the figures of the last hours.
		{Name: "nodes", Indexes: []mongodb.Index{
			{Name: "seenAt_1", Keys: mongodb.Ascending("seenAt")},
		}},
		{Name: "audit", Indexes: []mongodb.Index{
			// The index with an expiry has one field only.
			{Name: "at_1", Keys: mongodb.Ascending("at"), TTL: &month},
			{Name: "at_1__id_1", Keys: mongodb.Ascending("at", "_id")},
		}},
		{Name: "history"},

		// Package figures: the last counts of each watcher. Read by id.
		{Name: "figures"},

		// Package admin: replays.
		{Name: "replays", Indexes: []mongodb.Index{
			{Name: "finishedAt_1", Keys: mongodb.Ascending("finishedAt"), TTL: &month},
			{Name: "watcher_1_startedAt_1__id_1", Keys: mongodb.Ascending("watcher", "startedAt", "_id")},
		}},

		// Package waiting: the numbers of deliveries. Read by id.
		{Name: "counters"},

		// Package importing: the rows that were imported. Read by ids.
		{Name: "imports"},

		// What waits, and what is dead. Their packages declare the indexes.
		{Name: "waiting", Indexes: waiting.Indexes()},
		{Name: "letters", Indexes: letters.Indexes()},

		// Package claims: scheduled envelopes that are being sent. Read by ids and by the prefix of ids.
		{Name: waiting.ClaimsName},

		// Package watched: the outboxes with scheduled envelopes. Read by the watcher.
		{Name: "schedules", Indexes: []mongodb.Index{
			{Name: "watcher_1", Keys: mongodb.Ascending("watcher")},
		}},
	}
}

// Names returns the full names of the collections of the state database, the marker among them.
func (d Database) Names() []string { return NamesWith(d.prefix) }

// NamesWith is Names of a state database with the prefix.
func NamesWith(prefix string) []string {
	names := []string{prefix + markerName}
	for _, c := range Table() {
		names = append(names, prefix+c.Name)
	}
	return names
}
