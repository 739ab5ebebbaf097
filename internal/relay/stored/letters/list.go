package letters

import (
	"context"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/mongodb/listing"
)

// List returns up to limit letters of all outboxes of a watcher, or of one, the newest first. They have no envelopes: [Open] reads one
// with its envelope. after is next of the previous page, or "" for the first one; next is "" on the last page.
func List(ctx context.Context, coll *mongo.Collection, query Query, limit int, after string) (list []Dead, next string, err error) {
	list, next, err = listing.ReadPage[Dead](ctx, mongodb.Majority(coll), newest, query.mongoFilter(), after, limit,
		options.Find().SetProjection(bson.D{{Key: "envelope", Value: 0}}))
	return list, next, mongodb.DescribeError(err, "listing "+mongodb.Namespace(coll), "find", mongodb.Namespace(coll))
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
		SetSort(listing.Order{Field: "movedAt"}.Sort()).
		SetLimit(1).
		SetProjection(bson.D{{Key: "movedAt", Value: 1}}))
	if len(first) > 0 {
		moved := first[0].MovedAt.UTC()
		oldest = &moved
	}
	return n, oldest, err
}

// CountTopics counts the letters that are not requeued by their topics; the topic of an invalid envelope is "". It reads at
// most limit letters, and reports whether there were more.
func CountTopics(
	ctx context.Context, coll *mongo.Collection, watcher string, limit int64,
) (counts map[string]int64, more bool, err error) {
	query := Query{Watcher: watcher, RequeueStatus: NotRequeued}
	counts, err = mongodb.CountValues(ctx, mongodb.Majority(coll), query.mongoFilter(), "topic", limit)
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
	pipeline := listing.Summary(query.mongoFilter(), key, "movedAt", "requeued")
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
var newest = listing.Order{Field: "movedAt", Down: true}

// CursorOf returns the cursor of the page after a letter.
func CursorOf(letter *Dead) (string, error) { return newest.Cursor(letter.MovedAt, letter.ID) }
