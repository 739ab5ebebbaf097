package outboxes

import (
	"context"
	"errors"
	"fmt"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/mongodb"
)

// CountBehind counts the envelopes of coll whose stamp is later than after, up to limit, and tells the stamp of the oldest
// one; it is zero if there is none. It walks the index on ts, at most limit entries of it. Those of a transaction that was
// long under way may be stamped before, and are left out.
func CountBehind(ctx context.Context, coll *mongo.Collection, after bson.Timestamp, limit int64) (n int64, oldest bson.Timestamp, err error) {
	behind := bson.D{{Key: "ts", Value: bson.D{{Key: "$gt", Value: after}}}}
	if n, err = coll.CountDocuments(ctx, behind, options.Count().SetLimit(limit)); err != nil {
		return 0, oldest, mongodb.DescribeRefusal(err, "counting envelopes of "+mongodb.Namespace(coll), "find", mongodb.Namespace(coll), "")
	}
	if n == 0 {
		return 0, oldest, nil
	}
	var first struct {
		TS bson.Timestamp `bson:"ts"`
	}
	err = coll.FindOne(ctx, behind, options.FindOne().SetSort(bson.D{{Key: "ts", Value: 1}}).SetProjection(bson.D{{Key: "ts", Value: 1}, {Key: "_id", Value: 0}})).Decode(&first)
	if err != nil && !errors.Is(err, mongo.ErrNoDocuments) { // it may have gone meanwhile
		return n, oldest, fmt.Errorf("the oldest envelope of %s: %w", mongodb.Namespace(coll), err)
	}
	return n, first.TS, nil
}

// CountDue counts the scheduled envelopes of coll, up to limit, and tells when the first is due; it is zero if there is
// none. It walks the index on dueAt, at most limit entries of it.
func CountDue(ctx context.Context, coll *mongo.Collection, limit int64) (n int64, first time.Time, err error) {
	scheduled := IsScheduled()
	if n, err = coll.CountDocuments(ctx, scheduled, options.Count().SetLimit(limit)); err != nil {
		return 0, first, mongodb.DescribeRefusal(err, "counting scheduled envelopes of "+mongodb.Namespace(coll), "find", mongodb.Namespace(coll), "")
	}
	if n == 0 {
		return 0, first, nil
	}
	var one struct {
		DueAt time.Time `bson:"dueAt"`
	}
	err = coll.FindOne(ctx, scheduled, options.FindOne().SetSort(bson.D{{Key: "dueAt", Value: 1}}).SetProjection(bson.D{{Key: "dueAt", Value: 1}, {Key: "_id", Value: 0}})).Decode(&one)
	if err != nil && !errors.Is(err, mongo.ErrNoDocuments) {
		return n, first, fmt.Errorf("the first scheduled envelope of %s: %w", mongodb.Namespace(coll), err)
	}
	return n, one.DueAt, nil
}

// OldestTS is the oldest server stamp in coll; false if no document has one. Unstamped documents (0,0, missing, or not a
// Timestamp) do not count.
func OldestTS(ctx context.Context, coll *mongo.Collection) (bson.Timestamp, bool, error) {
	var doc struct {
		TS bson.Timestamp `bson:"ts"`
	}
	err := mongodb.Majority(coll).FindOne(ctx, bson.D{{Key: "ts", Value: bson.D{{Key: "$gt", Value: bson.Timestamp{}}}}},
		options.FindOne().SetSort(bson.D{{Key: "ts", Value: 1}}).SetProjection(bson.D{{Key: "_id", Value: 0}, {Key: "ts", Value: 1}})).Decode(&doc)
	if errors.Is(err, mongo.ErrNoDocuments) {
		return bson.Timestamp{}, false, nil
	}
	if err != nil {
		return bson.Timestamp{}, false, mongodb.DescribeRefusal(err, "oldest envelope of "+mongodb.Namespace(coll), "find", mongodb.Namespace(coll), "")
	}
	return doc.TS, true, nil
}
