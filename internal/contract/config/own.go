package config

import (
	"slices"

	"github.com/outrelay/outrelay/internal/base/glob"
	"github.com/outrelay/outrelay/internal/contract/record"
)

// OwnCollections are never watched, even if a pattern matches them: patterns of databases and collections. Dead letters would be
// published again. Inboxes, sagas, the server's own databases and system collections contain no envelopes. A temporary copy for $out, or
// for a rename into another database, counts once it has its final name.
var OwnCollections = []struct{ DB, Coll string }{
	{"*", "*_dead"},
	{"*", "*_cron"},
	{"*", record.InboxCollection},
	{"*", record.InboxCollection + "_*"},
	{"*", "*_sagas"},
	{"*", "saga_types"},
	{"admin", "*"},
	{"local", "*"},
	{"config", "*"},
	{"*", "system.*"},
	{"*", "tmp.agg_out.*"},
	{"*", "tmp*.renameCollection"},
}

// isOwn reports whether a watched name or pattern matches own collections only.
func isOwn(database, collection string) bool {
	return slices.ContainsFunc(OwnCollections, func(own struct{ DB, Coll string }) bool {
		return glob.Covers(own.DB, database) && glob.Covers(own.Coll, collection)
	})
}
