package migrate

import (
	"time"

	"github.com/outrelay/outrelay/internal/mongodb"
)

// logsKeptFor is the age at which entries of the events log and ended replays are removed.
const logsKeptFor = 30 * 24 * time.Hour

// StateIndexes are those of the collections in the state database, by the name of the collection.
func StateIndexes() map[string][]mongodb.Index {
	kept := int32(logsKeptFor / time.Second)
	return map[string][]mongodb.Index{
		"events": {{Name: "at_1", Keys: mongodb.Ascending("at"), TTL: &kept}},
		// Of replays that are over; one that broke off has no such field, and stays.
		"replays": {{Name: "finishedAt_1", Keys: mongodb.Ascending("finishedAt"), TTL: &kept}},
	}
}
