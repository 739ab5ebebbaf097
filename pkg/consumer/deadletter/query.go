package deadletter

import (
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/mongodb/listing"
)

// Query selects letters that fulfill all conditions that are set. The zero value selects all letters. An empty list that is not nil
// selects nothing.
type Query struct {
	IDs      []ID
	Messages []string // ids of messages: all letters of these messages; together with IDs: letters of either

	Group, Handler, Class, Name, AggregateType string

	Fingerprint string // of a [Summary]: the letters with its failure

	Topic        string    // of the message's first record
	Key          []byte    // nil: any; empty: the empty key
	Reason       string    // the beginning of the reason
	From, Before time.Time // given up at From or later, and before Before
	Requeued     *bool     // nil: both
	Archived     bool      // the discarded letters in the archive, in place of the others

	// NoValues leaves out the values of the letters, so that a list costs little. Only List uses it.
	NoValues bool
	// After begins a list after the letter with this Cursor. Only List uses it.
	After string
	// All lets Requeue and Discard act on every letter if there is no condition.
	All bool
}

// isEmpty reports whether the query has no condition except Requeued and Archived.
func (q Query) isEmpty() bool {
	q.Requeued, q.Archived = nil, false
	return len(q.buildFilter()) == len(Query{}.buildFilter()) && q.Class == ""
}

// buildFilter returns the filter of the query for MongoDB.
func (q Query) buildFilter() bson.D {
	var filter listing.Filter
	filter.Equal("class", q.Class)
	if q.Class == "" {
		// Chunks of large values have no class, so this condition leaves them out.
		filter.Exists("class", true)
	}
	listing.InEither(&filter, "_id", q.IDs, "_id.message", q.Messages)
	filter.Equal("_id.group", q.Group)
	filter.Equal("_id.handler", q.Handler)
	filter.Equal("name", q.Name)
	filter.Equal("aggregate.type", q.AggregateType)
	filter.Equal("_id.topic", q.Topic)
	filter.Equal("fingerprint", q.Fingerprint)

	if q.Key != nil {
		filter.Require("key", q.Key)
	}
	filter.Prefix("reason", q.Reason)
	filter.During("givenUpAt", q.From, q.Before)
	filter.Exists("archived", q.Archived)
	if q.Requeued != nil {
		filter.Exists("requeued", *q.Requeued)
	}
	return bson.D(filter)
}
