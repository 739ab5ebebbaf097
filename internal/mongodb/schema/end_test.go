package schema_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
)

// TestNothingReleasesWritersFromTheEndOfABuild proves the limit that Change documents: a build that waits at its end for
// a transaction that began during the build ignores killSessions, killOp and dropIndexes, and inserts wait with it. If
// this test fails for a newer server, Change can end such a build.
func TestNothingReleasesWritersFromTheEndOfABuild(t *testing.T) {
	t.Parallel()
	client := stacktest.Client(t)
	coll := stacktest.Database(t, client).Collection("outbox")
	admin := client.Database("admin")
	marker := bson.NewObjectID()
	if _, err := coll.InsertOne(t.Context(), bson.D{{Key: "_id", Value: marker}, {Key: "a", Value: 1}}); err != nil {
		t.Fatal(err)
	}

	// The scan of this collection stops at its document, as if the collection were large.
	const name = "hangIndexBuildDuringCollectionScanPhaseBeforeInsertion"
	failPoint := func(ctx context.Context, mode any) {
		t.Helper()
		command := bson.D{{Key: "configureFailPoint", Value: name}, {Key: "mode", Value: mode}}
		if mode != "off" {
			fields := bson.D{{Key: "fieldsToMatch", Value: bson.D{{Key: "_id", Value: marker}}}}
			command = append(command, bson.E{Key: "data", Value: fields})
		}
		if err := admin.RunCommand(ctx, command).Err(); err != nil {
			t.Error(err)
		}
	}
	failPoint(t.Context(), "alwaysOn")
	t.Cleanup(func() { failPoint(context.WithoutCancel(t.Context()), "off") })

	session, err := client.StartSession()
	if err != nil {
		t.Fatal(err)
	}
	defer session.EndSession(context.WithoutCancel(t.Context()))
	ended := make(chan error, 2)
	go func() { ended <- createIndex(coll)(mongo.NewSessionContext(t.Context(), session)) }()
	builder := func(waiting bool) (opid any, found bool) {
		t.Helper()
		var ops []bson.M
		cur, err := admin.Aggregate(t.Context(), bson.A{
			bson.D{{Key: "$currentOp", Value: bson.D{{Key: "allUsers", Value: true}, {Key: "idleConnections", Value: true}}}},
			bson.D{{Key: "$match", Value: bson.D{
				{Key: "desc", Value: bson.D{{Key: "$regex", Value: "^IndexBuildsCoordinator"}}},
				{Key: "ns", Value: coll.Database().Name() + "." + coll.Name()},
				{Key: "waitingForLock", Value: waiting},
			}}},
		})
		if err == nil {
			err = cur.All(t.Context(), &ops)
		}
		if err != nil {
			t.Fatal(err)
		}
		if len(ops) == 0 {
			return nil, false
		}
		return ops[0]["opid"], true
	}
	stacktest.Eventually(t, "the build scans the collection", func() bool { _, ok := builder(false); return ok })

	open := stacktest.OpenTransaction(t, coll)
	failPoint(t.Context(), "off")
	var opid any
	stacktest.Eventually(t, "the build waits for the transaction", func() (ok bool) { opid, ok = builder(true); return ok })

	for _, command := range []bson.D{
		{{Key: "killSessions", Value: bson.A{session.ID()}}},
		{{Key: "killOp", Value: 1}, {Key: "op", Value: opid}},
	} {
		if err := admin.RunCommand(t.Context(), command).Err(); err != nil {
			t.Error(err)
		}
	}
	go func() { ended <- coll.Indexes().DropOne(t.Context(), "a_1") }()

	insert := bson.D{
		{Key: "insert", Value: coll.Name()},
		{Key: "documents", Value: bson.A{bson.D{{Key: "a", Value: 2}}}},
		{Key: "maxTimeMS", Value: 2000},
	}
	// The build may wait for locks before its end as well. It holds inserts up only at its end.
	const maxTimeExpired = 50
	stacktest.Eventually(t, "an insert during the ended build still waits after 2 s", func() bool {
		se := mongo.ServerError(nil)
		return errors.As(coll.Database().RunCommand(t.Context(), insert).Err(), &se) && se.HasErrorCode(maxTimeExpired)
	})
	open.CommitAfter(0)
	for range 2 {
		select {
		case <-ended:
		case <-time.After(time.Minute):
			t.Fatal("the build does not end after the transaction")
		}
	}
}
