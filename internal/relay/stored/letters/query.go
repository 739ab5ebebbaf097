package letters

import (
	"errors"
	"math"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/mongodb/listing"
)

// RequeueStatus selects letters by whether they are requeued.
type RequeueStatus string

// The values of Query.RequeueStatus.
const (
	AnyRequeueStatus RequeueStatus = ""
	NotRequeued      RequeueStatus = "false"
	Requeued         RequeueStatus = "true"
)

// Query selects letters of one watcher. A letter matches if it fulfills all conditions that are set. A query with
// nothing but the watcher matches every letter of the watcher.
type Query struct {
	Watcher       string          // required
	NS            string          // only of this outbox
	Letters       []string        // ids of letters; together with IDs: letters of either
	IDs           []bson.RawValue // ids of envelopes with their BSON types; all letters of them match
	From, To      time.Time       // died at From or later, and before To
	Topic         string
	Type          string
	AggregateType string
	Key           string // the ordering key, as text
	Class         record.Class
	Message       string // prefix of the reason, case-sensitive
	RequeueStatus RequeueStatus
	Fingerprint   string // of the failure
	Archived      bool   // the letters in the archive, in place of the others

	// All allows a query without conditions to requeue or discard every letter.
	All bool
}

// ErrEmptyQuery is returned by a requeue or a discard whose query has no condition.
var ErrEmptyQuery = errors.New("the query has no condition; add one, or set all if every dead letter is meant")

// Empty reports whether the query has no condition except Watcher, NS, RequeueStatus and Archived.
func (q Query) Empty() bool {
	return q.Letters == nil && q.IDs == nil && q.From.IsZero() && q.To.IsZero() && q.Topic == "" && q.Type == "" &&
		q.AggregateType == "" && q.Key == "" && q.Class == "" && q.Message == "" && q.Fingerprint == ""
}

// RestrictToAction returns the query for an action that begins at now. It returns [ErrEmptyQuery]
// for an empty query without All. The new query matches only letters that existed before the action
// began. Otherwise an envelope that dies again immediately would be requeued again.
func (q Query) RestrictToAction(now time.Time) (Query, error) {
	if q.Empty() && !q.All {
		return q, ErrEmptyQuery
	}

	// To is exclusive, and letters of the current millisecond already existed.
	end := now.Add(time.Millisecond)
	if q.To.IsZero() || q.To.After(end) {
		q.To = end
	}
	return q, nil
}

// earliest is before the death of every letter.
var earliest = time.UnixMilli(math.MinInt64 / 2)

// mongoFilter returns the filter of the query. It never matches chunks, because they have no
// movedAt.
func (q Query) mongoFilter() bson.D {
	from := q.From
	if from.IsZero() {
		from = earliest
	}
	var filter listing.Filter
	filter.Equal("watcher", q.Watcher)
	filter.During("movedAt", from, q.To)

	listing.InEither(&filter, "_id", q.Letters, "id", shortIDs(q.IDs))
	filter.Equal("ns", q.NS)
	filter.Equal("topic", q.Topic)
	filter.Equal("type", q.Type)
	filter.Equal("aggregatetype", q.AggregateType)
	filter.Equal("key", q.Key)
	filter.Equal("class", string(q.Class))
	filter.Prefix("reason", q.Message)
	filter.Equal("fingerprint", q.Fingerprint)
	filter.Exists("archived", q.Archived)
	if q.RequeueStatus != AnyRequeueStatus {
		filter.Exists("requeued", q.RequeueStatus == Requeued)
	}
	return bson.D(filter)
}

// idIn returns the filter for the documents with these ids, which must be a slice.
func idIn(ids any) bson.D {
	return bson.D{{Key: "_id", Value: bson.D{{Key: "$in", Value: ids}}}}
}
