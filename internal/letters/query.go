package letters

import (
	"errors"
	"math"
	"regexp"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/record"
)

// RequeueStatus selects letters by whether they are requeued.
type RequeueStatus string

// The values of Query.RequeueStatus.
const (
	AnyRequeueStatus RequeueStatus = ""
	Replayable       RequeueStatus = "replayable" // not requeued
	Requeued         RequeueStatus = "replayed"
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

	// All allows a query without conditions to requeue or discard every letter.
	All bool
}

// ErrEmptyQuery is returned by a requeue or a discard whose query has no condition.
var ErrEmptyQuery = errors.New("the query has no condition; add one, or set all if every dead letter is meant")

// Empty reports whether the query has no condition except Watcher, NS and RequeueStatus.
func (q Query) Empty() bool {
	return len(q.Letters) == 0 && len(q.IDs) == 0 && q.From.IsZero() && q.To.IsZero() && q.Topic == "" && q.Type == "" &&
		q.AggregateType == "" && q.Key == "" && q.Class == "" && q.Message == ""
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

// mongoFilter returns the filter of the query. It never matches chunks, because they have no
// movedAt.
func (q Query) mongoFilter() bson.D {
	moved := bson.D{{Key: "$gte", Value: bson.DateTime(math.MinInt64)}}
	if !q.From.IsZero() {
		moved[0].Value = bson.NewDateTimeFromTime(q.From)
	}
	if !q.To.IsZero() {
		moved = append(moved, bson.E{Key: "$lt", Value: bson.NewDateTimeFromTime(q.To)})
	}

	filter := bson.D{{Key: "watcher", Value: q.Watcher}, {Key: "movedAt", Value: moved}}
	ofLetters := bson.D{{Key: "_id", Value: bson.D{{Key: "$in", Value: q.Letters}}}}
	ofIDs := bson.D{{Key: "id", Value: bson.D{{Key: "$in", Value: shortIDs(q.IDs)}}}}
	switch {
	case len(q.Letters) > 0 && len(q.IDs) > 0:
		filter = append(filter, bson.E{Key: "$or", Value: bson.A{ofLetters, ofIDs}})
	case len(q.Letters) > 0:
		filter = append(filter, ofLetters...)
	case len(q.IDs) > 0:
		filter = append(filter, ofIDs...)
	}

	for _, c := range []struct{ field, value string }{
		{"ns", q.NS},
		{"topic", q.Topic},
		{"type", q.Type},
		{"aggregatetype", q.AggregateType},
		{"key", q.Key},
		{"class", string(q.Class)},
	} {
		if c.value != "" {
			filter = append(filter, bson.E{Key: c.field, Value: c.value})
		}
	}
	if q.Message != "" {
		prefix := bson.Regex{Pattern: "^" + regexp.QuoteMeta(q.Message)}
		filter = append(filter, bson.E{Key: "reason", Value: prefix})
	}
	if q.RequeueStatus != AnyRequeueStatus {
		isRequeued := bson.D{{Key: "$exists", Value: q.RequeueStatus == Requeued}}
		filter = append(filter, bson.E{Key: "replayed", Value: isRequeued})
	}
	return filter
}

// joinFilters returns a filter that matches if all filters match.
func joinFilters(filters ...bson.D) bson.D {
	return bson.D{{Key: "$and", Value: filters}}
}

// idIn returns the filter for the documents with these ids, which must be a slice.
func idIn(ids any) bson.D {
	return bson.D{{Key: "_id", Value: bson.D{{Key: "$in", Value: ids}}}}
}
