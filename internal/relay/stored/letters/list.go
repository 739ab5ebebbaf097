package letters

import (
	"context"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/mongodb/letterlist"
)

// Bounds of a page.
const (
	PageSize    = 100 // the default
	MaxPageSize = 1000
)

// Page selects one page of a list.
type Page struct {
	Limit int    // letters; 0 means PageSize
	After string // Next of the previous page, or "" for the first page
}

// Listing is one page. Its letters have no envelopes: [Open] reads one with its envelope.
type Listing struct {
	Letters []Dead // newest first
	Total   int64  // number of matching letters on all pages
	Next    string // After of the next page, or "" on the last page
}

// List returns a page of the letters of all outboxes of a watcher, or of one. A cursor remains
// valid while letters are added, requeued or discarded: it contains the place of the last letter,
// not a number of letters.
func List(ctx context.Context, coll *mongo.Collection, query Query, page Page) (Listing, error) {
	limit := page.Limit
	if limit <= 0 {
		limit = PageSize
	}
	limit = min(limit, MaxPageSize)

	filter := query.mongoFilter()
	if page.After != "" {
		after, err := parseCursor(page.After)
		if err != nil {
			return Listing{}, err
		}
		filter = letterlist.All(filter, newest.After(after.MovedAt, after.ID))
	}

	// One letter more than the limit shows whether there is another page.
	found, err := mongodb.FindAll[Dead](ctx, mongodb.Majority(coll), "listing "+mongodb.Namespace(coll), filter, options.Find().
		SetSort(newest.Sort()).
		SetLimit(int64(limit)+1).
		SetProjection(bson.D{{Key: "envelope", Value: 0}}))
	if err != nil {
		return Listing{}, err
	}

	out := Listing{Letters: found}
	if len(found) > limit {
		out.Letters = found[:limit]
		if out.Next, err = CursorOf(&found[limit-1]); err != nil {
			return Listing{}, err
		}
	}

	out.Total, err = Count(ctx, coll, query)
	return out, err
}

// Count returns the number of letters that match query.
func Count(ctx context.Context, coll *mongo.Collection, query Query) (int64, error) {
	if err := mongodb.CatchUp(ctx, coll); err != nil {
		return 0, err
	}
	n, err := mongodb.Majority(coll).CountDocuments(ctx, query.mongoFilter())
	return n, mongodb.DescribeError(err, "counting "+mongodb.Namespace(coll), "find", mongodb.Namespace(coll))
}

// CountOpen returns the number of letters of a watcher that are not requeued, and when the oldest of them died; nil if there is none.
func CountOpen(ctx context.Context, coll *mongo.Collection, watcher string) (n int64, oldest *time.Time, err error) {
	query := Query{Watcher: watcher, RequeueStatus: NotRequeued}
	if n, err = Count(ctx, coll, query); err != nil || n == 0 {
		return n, nil, err
	}

	first, err := mongodb.FindAll[Dead](ctx, mongodb.Majority(coll), "finding the oldest of "+mongodb.Namespace(coll), query.mongoFilter(), options.Find().
		SetSort(letterlist.Order{Field: "movedAt"}.Sort()).
		SetLimit(1).
		SetProjection(bson.D{{Key: "movedAt", Value: 1}}))
	if len(first) > 0 {
		moved := first[0].MovedAt.UTC()
		oldest = &moved
	}
	return n, oldest, err
}

// CountOutboxes returns the numbers of the letters that match query by their outboxes.
func CountOutboxes(ctx context.Context, coll *mongo.Collection, query Query) (map[string]int64, error) {
	counts, _, err := countValues(ctx, coll, query, "ns", 0)
	return counts, err
}

// CountTopics counts the letters that are not requeued by their topics; the topic of an invalid envelope is "". It reads at
// most limit letters, and reports whether there were more.
func CountTopics(
	ctx context.Context, coll *mongo.Collection, watcher string, limit int64,
) (counts map[string]int64, more bool, err error) {
	return countValues(ctx, coll, Query{Watcher: watcher, RequeueStatus: NotRequeued}, "topic", limit)
}

// countValues counts the letters that match query by the text in a field. A limit of 0 is none.
func countValues(
	ctx context.Context, coll *mongo.Collection, query Query, field string, limit int64,
) (counts map[string]int64, more bool, err error) {
	if limit == 0 {
		limit = 1<<63 - 1
	}
	counts, err = mongodb.CountValues(ctx, mongodb.Majority(coll), query.mongoFilter(), field, limit)
	var read int64
	for _, n := range counts {
		read += n
	}
	return counts, read == limit, err
}

// Group summarizes the letters with the same failure: topic, type, class, and message without variable parts.
type Group struct {
	Fingerprint string       `json:"fingerprint"` // selects the letters of the group
	Failure     string       `json:"failure"`     // the message
	Topic       string       `json:"topic,omitempty"`
	Type        string       `json:"type"`
	Class       record.Class `json:"class"`
	Count       int64        `json:"count"`
	NotRequeued int64        `json:"not_requeued" bson:"-"` // letters of Count that are not requeued
	First       time.Time    `json:"first"`                 // when the oldest letter died
	Last        time.Time    `json:"last"`                  // when the newest letter died
}

// Summarize counts the letters that match query by their failure. The largest group comes
// first.
func Summarize(ctx context.Context, coll *mongo.Collection, query Query) ([]Group, error) {
	key := bson.D{
		{Key: "fingerprint", Value: "$fingerprint"}, {Key: "failure", Value: "$failure"}, {Key: "topic", Value: mongodb.IfNull("$topic", "")}, {Key: "type", Value: mongodb.IfNull("$type", "")}, {Key: "class", Value: "$class"},
	}
	pipeline := letterlist.Summary(query.mongoFilter(), key, "movedAt", "requeued")
	type counted struct {
		Group    `bson:",inline"`
		Requeued int64
	}
	list, err := mongodb.AggregateAll[counted](ctx, mongodb.Majority(coll), "summarizing "+mongodb.Namespace(coll), pipeline)

	groups := make([]Group, len(list))
	for i, c := range list {
		groups[i] = c.Group
		groups[i].NotRequeued = c.Count - c.Requeued
	}
	return groups, err
}

// newest is the order of a list: the newest letter first.
var newest = letterlist.Order{Field: "movedAt", Down: true}

// cursor is the place of a letter in the order of a list: by the time of its death and its id, both descending.
type cursor struct {
	MovedAt bson.DateTime `bson:"m"`
	ID      string        `bson:"i"`
}

// CursorOf returns the cursor of the page after a letter.
func CursorOf(letter *Dead) (string, error) {
	return mongodb.EncodeCursor(cursor{bson.NewDateTimeFromTime(letter.MovedAt), letter.ID})
}

// parseCursor parses the text of a cursor. It returns [mongodb.ErrCursor] for an invalid text.
func parseCursor(text string) (cursor cursor, err error) {
	if mongodb.ParseCursor(text, &cursor) != nil || !IsID(cursor.ID) {
		return cursor, mongodb.ErrCursor
	}
	return cursor, nil
}
