package store

import (
	"context"
	"errors"
	"fmt"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
)

// CatchUp returns once majority reads of coll see everything that was acknowledged before the call. Without it they may
// miss what a writer was told about a moment ago (N22). It costs two calls.
func CatchUp(ctx context.Context, coll *mongo.Collection) error {
	client := coll.Database().Client()
	now, err := ClusterTime(ctx, client)
	switch {
	case errors.Is(err, ErrNoClusterTime):
		return nil // what is acknowledged is seen
	case err != nil:
		return err
	}
	sess, err := Causal(ctx, client, now)
	if err != nil {
		return err
	}
	defer sess.EndSession(context.WithoutCancel(ctx))
	err = Majority(coll).FindOne(mongo.NewSessionContext(ctx, sess), bson.D{}, options.FindOne().SetProjection(bson.D{{Key: "_id", Value: 1}})).Err()
	if err != nil && !errors.Is(err, mongo.ErrNoDocuments) {
		return privilege(err, "reading "+Namespace(coll), "find", Namespace(coll), "")
	}
	return nil
}

// Causal is a session whose reads see everything that was committed up to at. N22: the server waits until it is
// majority-committed; a majority read without that misses what was committed just before.
func Causal(ctx context.Context, client *mongo.Client, at bson.Timestamp) (*mongo.Session, error) {
	sess, err := client.StartSession(options.Session().SetCausalConsistency(true))
	if err != nil {
		return nil, fmt.Errorf("starting a session: %w", err)
	}
	if err := sess.AdvanceOperationTime(&at); err != nil {
		sess.EndSession(context.WithoutCancel(ctx))
		return nil, fmt.Errorf("setting a session's time: %w", err)
	}
	return sess, nil
}
