package deadletter

import (
	"errors"
	"math"
	"regexp"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/record"
)

// Stand is whether a letter was requeued.
type Stand string

// The stands that a query may ask for.
const (
	AnyStand   Stand = ""
	Replayable Stand = "replayable" // nobody requeued it
	Requeued   Stand = "replayed"
)

// Query says which letters. Conditions that are set hold all together; the zero query is every letter.
type Query struct {
	IDs           []bson.RawValue // of envelopes, each with its type; every delivery of them
	From, To      time.Time       // moved to the dead letters at From or later, and before To
	Topic         string
	Type          string
	AggregateType string
	Key           string // the ordering key, as text
	Class         record.Class
	Message       string // the reason begins with it, letter by letter
	SourceKind    string // "relay" or "handler"
	Stand         Stand

	// All lets a query without any condition requeue or discard: every letter there is.
	All bool
}

// ErrEmptyQuery refuses to requeue or discard by a query that names no condition.
var ErrEmptyQuery = errors.New("the query names no dead letters; give it a condition, or say that all of them are meant")

// Empty reports whether the query has no condition but the stand.
func (q Query) Empty() bool {
	return len(q.IDs) == 0 && q.From.IsZero() && q.To.IsZero() && q.Topic == "" && q.Type == "" && q.AggregateType == "" &&
		q.Key == "" && q.Class == "" && q.Message == "" && q.SourceKind == ""
}

// restrictToAction is the query as an action may use it: not empty by mistake, and of letters that were there before it began,
// else one that dies again at once would be requeued again.
func (q Query) restrictToAction(now time.Time) (Query, error) {
	if q.Empty() && !q.All {
		return q, ErrEmptyQuery
	}
	if end := now.Add(time.Millisecond); q.To.IsZero() || q.To.After(end) {
		q.To = end
	}
	return q, nil
}

// mongoFilter matches letters and never their chunks, which have no movedAt.
func (q Query) mongoFilter() bson.D {
	moved := bson.D{{Key: "$gte", Value: bson.DateTime(math.MinInt64)}}
	if !q.From.IsZero() {
		moved[0].Value = bson.NewDateTimeFromTime(q.From)
	}
	if !q.To.IsZero() {
		moved = append(moved, bson.E{Key: "$lt", Value: bson.NewDateTimeFromTime(q.To)})
	}
	f := bson.D{{Key: "movedAt", Value: moved}}
	if len(q.IDs) > 0 {
		f = append(f, bson.E{Key: "_id.id", Value: bson.D{{Key: "$in", Value: q.IDs}}})
	}
	for _, c := range []struct{ field, value string }{
		{"topic", q.Topic}, {"type", q.Type}, {"aggregatetype", q.AggregateType}, {"key", q.Key}, {"class", string(q.Class)}, {"source.kind", q.SourceKind},
	} {
		if c.value != "" {
			f = append(f, bson.E{Key: c.field, Value: c.value})
		}
	}
	if q.Message != "" {
		f = append(f, bson.E{Key: "reason", Value: bson.Regex{Pattern: "^" + regexp.QuoteMeta(q.Message)}})
	}
	if q.Stand != AnyStand {
		f = append(f, bson.E{Key: "replayed", Value: bson.D{{Key: "$exists", Value: q.Stand == Requeued}}})
	}
	return f
}

// joinFilters joins filters.
func joinFilters(filters ...bson.D) bson.D {
	all := make(bson.A, len(filters))
	for i, f := range filters {
		all[i] = f
	}
	return bson.D{{Key: "$and", Value: all}}
}

func fieldIn(field string, values any) bson.D {
	return bson.D{{Key: field, Value: bson.D{{Key: "$in", Value: values}}}}
}
