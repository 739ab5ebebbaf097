package mongodb

import (
	"context"
	"errors"
	"fmt"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
	"go.mongodb.org/mongo-driver/v2/mongo/readpref"
)

// Empty reports whether coll holds no document.
func Empty(ctx context.Context, coll *mongo.Collection) (bool, error) {
	err := Majority(coll).FindOne(ctx, bson.D{}, options.FindOne().SetProjection(bson.D{{Key: "_id", Value: 1}})).Err()
	if errors.Is(err, mongo.ErrNoDocuments) {
		return true, nil
	}
	if err != nil {
		return false, DescribeRefusal(err, "looking into "+Namespace(coll), "find", Namespace(coll), "")
	}
	return false, nil
}

// Fetch reads one envelope as it is, majority committed (N21). The bytes are the caller's. [ErrNotFound] if it is gone.
func Fetch(ctx context.Context, coll *mongo.Collection, id bson.RawValue) (bson.Raw, error) {
	raw, err := Majority(coll).FindOne(ctx, bson.D{{Key: "_id", Value: id}}).Raw()
	if errors.Is(err, mongo.ErrNoDocuments) {
		return nil, fmt.Errorf("fetching an envelope of %s: %w", Namespace(coll), ErrNotFound)
	}
	if err != nil {
		return nil, DescribeRefusal(err, "fetching an envelope of "+Namespace(coll), "find", Namespace(coll), "")
	}
	return raw, nil
}

// FetchMany reads those of ids that are there, majority committed (N21), and hands each to take, in no order; the bytes
// are valid during the call only. An error of take ends it and is returned.
func FetchMany(ctx context.Context, coll *mongo.Collection, ids []bson.RawValue, take func(bson.Raw) error) error {
	if len(ids) == 0 {
		return nil
	}
	cur, err := Majority(coll).Find(ctx, bson.D{{Key: "_id", Value: bson.D{{Key: "$in", Value: ids}}}})
	if err != nil {
		return DescribeRefusal(err, "fetching envelopes of "+Namespace(coll), "find", Namespace(coll), "")
	}
	return EachDocument(ctx, cur, "fetching envelopes of "+Namespace(coll), take)
}

// EachDocument hands what a cursor brings to take, and closes it. An error of take ends it and is returned as it is; the cursor's own
// says what was being done.
func EachDocument(ctx context.Context, cur *mongo.Cursor, doing string, take func(bson.Raw) error) error {
	defer func() { _ = cur.Close(context.WithoutCancel(ctx)) }() // the server ends a cursor that stays by itself
	for cur.Next(ctx) {
		if err := take(cur.Current); err != nil {
			return err
		}
	}
	if err := cur.Err(); err != nil {
		return fmt.Errorf("%s: %w", doing, err)
	}
	return nil
}

// ServerTime is the primary's clock.
func ServerTime(ctx context.Context, client *mongo.Client) (time.Time, error) {
	var reply struct {
		LocalTime time.Time `bson:"localTime"`
	}
	err := client.Database("admin").RunCommand(ctx, bson.D{{Key: "hello", Value: 1}}, options.RunCmd().SetReadPreference(readpref.Primary())).Decode(&reply)
	if err != nil {
		return time.Time{}, fmt.Errorf("asking the server's time: %w", err)
	}
	return reply.LocalTime, nil
}
