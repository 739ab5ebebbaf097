package mongodb

import (
	"context"
	"errors"
	"fmt"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
)

// CatchUp blocks until majority reads of coll see every write that was acknowledged before the call.
// Without it, they may miss the latest of these writes (N22). It costs two calls.
func CatchUp(ctx context.Context, coll *mongo.Collection) error {
	return AfterCommitted(ctx, coll, func(ctx context.Context) error {
		_, err := Exists(ctx, Majority(coll), bson.D{})
		return err
	})
}

// SettledTime returns a cluster time up to which every commit is visible, also for commands without a read concern, such as
// listCollections, and after which all others are. ClusterTime does not: the server gives a transaction its time before its
// commit is visible, and reports the later time of another write meanwhile. A read of coll with that time waits until no such
// transaction is left. It costs two calls.
func SettledTime(ctx context.Context, coll *mongo.Collection) (clusterTime bson.Timestamp, err error) {
	client := coll.Database().Client()
	if clusterTime, err = ClusterTime(ctx, client); err != nil {
		return clusterTime, err
	}

	return clusterTime, readAfter(ctx, client, clusterTime, func(ctx context.Context) error {
		_, err := Exists(ctx, Majority(coll), bson.D{})
		return err
	})
}

// Causal returns a session whose reads see everything that was committed up to clusterTime. N22: the server waits
// until all of it is majority-committed. Without the session, a majority read misses the latest commits.
func Causal(ctx context.Context, client *mongo.Client, clusterTime bson.Timestamp) (*mongo.Session, error) {
	session, err := client.StartSession(options.Session().SetCausalConsistency(true))
	if err != nil {
		return nil, fmt.Errorf("starting a session: %w", err)
	}

	if err := session.AdvanceOperationTime(&clusterTime); err != nil {
		session.EndSession(context.WithoutCancel(ctx))
		return nil, fmt.Errorf("setting a session's time: %w", err)
	}
	return session, nil
}

// AfterCommitted calls read with a session whose reads see everything that was committed before the call.
// Without the session, a majority read may miss the latest transaction, and show a finished envelope
// as waiting. After an election, it may even miss what the primary before has acknowledged with majority. It costs one call.
func AfterCommitted(ctx context.Context, coll *mongo.Collection, read func(context.Context) error) error {
	client := coll.Database().Client()
	now, err := ClusterTime(ctx, client)
	if errors.Is(err, errNoClusterTime) {
		// Reads of a server without a cluster time see all acknowledged writes.
		return read(ctx)
	}
	if err != nil {
		return err
	}

	return readAfter(ctx, client, now, read)
}

// readAfter calls read with a session of [Causal].
func readAfter(ctx context.Context, client *mongo.Client, clusterTime bson.Timestamp, read func(context.Context) error) error {
	session, err := Causal(ctx, client, clusterTime)
	if err != nil {
		return err
	}
	defer session.EndSession(context.WithoutCancel(ctx))

	return read(mongo.NewSessionContext(ctx, session))
}
