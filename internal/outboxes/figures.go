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

// CountBehind counts the envelopes of coll with a stamp later than after, up to limit. It also returns the
// oldest of these stamps, or zero if there is none. It reads at most limit entries of the index on ts. The
// envelopes of a long transaction may have a stamp before after, and are not counted.
func CountBehind(
	ctx context.Context, coll *mongo.Collection, after bson.Timestamp, limit int64,
) (n int64, oldest bson.Timestamp, err error) {
	ns := mongodb.Namespace(coll)
	behind := bson.D{{Key: "ts", Value: bson.D{{Key: "$gt", Value: after}}}}
	if n, err = coll.CountDocuments(ctx, behind, options.Count().SetLimit(limit)); err != nil {
		return 0, oldest, mongodb.Refusal(err, "counting envelopes of "+ns, "find", ns)
	}
	if n == 0 {
		return 0, oldest, nil
	}

	var first struct {
		TS bson.Timestamp `bson:"ts"`
	}
	opts := options.FindOne().SetSort(bson.D{{Key: "ts", Value: 1}}).
		SetProjection(bson.D{{Key: "ts", Value: 1}, {Key: "_id", Value: 0}})
	err = coll.FindOne(ctx, behind, opts).Decode(&first)

	// The envelope may have been deleted after the count.
	if err != nil && !errors.Is(err, mongo.ErrNoDocuments) {
		return n, oldest, fmt.Errorf("reading the oldest envelope of %s: %w", ns, err)
	}
	return n, first.TS, nil
}

// CountDue counts the scheduled envelopes of coll, up to limit. It also returns the time at which the first is
// due, or zero if there is none. It reads at most limit entries of the index on dueAt.
func CountDue(ctx context.Context, coll *mongo.Collection, limit int64) (n int64, first time.Time, err error) {
	ns := mongodb.Namespace(coll)
	scheduled := IsScheduled()
	if n, err = coll.CountDocuments(ctx, scheduled, options.Count().SetLimit(limit)); err != nil {
		return 0, first, mongodb.Refusal(err, "counting scheduled envelopes of "+ns, "find", ns)
	}
	if n == 0 {
		return 0, first, nil
	}

	var one struct {
		DueAt time.Time `bson:"dueAt"`
	}
	opts := options.FindOne().SetSort(bson.D{{Key: "dueAt", Value: 1}}).
		SetProjection(bson.D{{Key: "dueAt", Value: 1}, {Key: "_id", Value: 0}})
	err = coll.FindOne(ctx, scheduled, opts).Decode(&one)

	// The envelope may have been sent or canceled after the count.
	if err != nil && !errors.Is(err, mongo.ErrNoDocuments) {
		return n, first, fmt.Errorf("reading the first scheduled envelope of %s: %w", ns, err)
	}
	return n, one.DueAt, nil
}

// OldestTS returns the oldest server stamp in coll, and false if no document has one. Unstamped documents
// (0,0, missing, or not a Timestamp) do not count.
func OldestTS(ctx context.Context, coll *mongo.Collection) (bson.Timestamp, bool, error) {
	var doc struct {
		TS bson.Timestamp `bson:"ts"`
	}
	stamped := bson.D{{Key: "ts", Value: bson.D{{Key: "$gt", Value: bson.Timestamp{}}}}}
	opts := options.FindOne().SetSort(bson.D{{Key: "ts", Value: 1}}).
		SetProjection(bson.D{{Key: "_id", Value: 0}, {Key: "ts", Value: 1}})
	err := mongodb.Majority(coll).FindOne(ctx, stamped, opts).Decode(&doc)
	if errors.Is(err, mongo.ErrNoDocuments) {
		return bson.Timestamp{}, false, nil
	}
	if err != nil {
		ns := mongodb.Namespace(coll)
		return bson.Timestamp{}, false, mongodb.Refusal(err, "reading the oldest envelope of "+ns, "find", ns)
	}

	return doc.TS, true, nil
}
