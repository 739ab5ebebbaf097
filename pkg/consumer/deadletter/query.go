package deadletter

import (
	"regexp"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
)

// Query selects letters that fulfill all conditions that are set. The zero value selects all letters.
type Query struct {
	IDs      []ID
	Messages []string // ids of messages: all letters of these messages

	Group, Handler, Class, Name, AggregateType string

	Topic        string // of the message's first record
	Key          []byte
	Reason       string    // the beginning of the reason
	From, Before time.Time // given up at From or later, and before Before
	Requeued     *bool     // nil: both

	// NoValues leaves out the values of the letters, so that a list costs little. Only All uses it.
	NoValues bool
	// After begins a list after the letter with this Cursor. Only All uses it.
	After string
	// All lets Requeue and Discard act on every letter if there is no condition.
	All bool
}

// isEmpty reports whether the query has no condition except Requeued.
func (q Query) isEmpty() bool {
	q.Requeued = nil
	return len(q.buildFilter()) == 1 && q.Class == ""
}

// buildFilter returns the filter of the query for MongoDB.
func (q Query) buildFilter() bson.D {
	// Chunks of large values have no class, so this condition leaves them out.
	filter := bson.D{{Key: "class", Value: bson.D{{Key: "$exists", Value: true}}}}
	if q.Class != "" {
		filter[0].Value = q.Class
	}
	require := func(isSet bool, field string, v any) {
		if isSet {
			filter = append(filter, bson.E{Key: field, Value: v})
		}
	}

	require(len(q.IDs) > 0, "_id", bson.D{{Key: "$in", Value: q.IDs}})
	require(len(q.Messages) > 0, "_id.message", bson.D{{Key: "$in", Value: q.Messages}})
	require(q.Group != "", "_id.group", q.Group)
	require(q.Handler != "", "_id.handler", q.Handler)
	require(q.Name != "", "name", q.Name)
	require(q.AggregateType != "", "aggregate.type", q.AggregateType)
	require(q.Topic != "", "_id.topic", q.Topic)
	require(len(q.Key) > 0, "key", q.Key)
	// Reasons often end with an id, so a prefix selects all of a kind.
	require(q.Reason != "", "reason", bson.D{{Key: "$regex", Value: "^" + regexp.QuoteMeta(q.Reason)}})

	var during bson.D
	if !q.From.IsZero() {
		during = append(during, bson.E{Key: "$gte", Value: q.From})
	}
	if !q.Before.IsZero() {
		during = append(during, bson.E{Key: "$lt", Value: q.Before})
	}
	require(len(during) > 0, "givenUpAt", during)

	if q.Requeued != nil {
		require(true, "requeued", bson.D{{Key: "$exists", Value: *q.Requeued}})
	}
	return filter
}
