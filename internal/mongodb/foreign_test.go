package mongodb_test

import (
	"context"
	"errors"
	"slices"
	"sync/atomic"
	"testing"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/mongodb"
)

// watchers makes the documents of a watcher's slots and of another watcher whose name begins the same.
func watchers(t *testing.T, state *mongo.Database, ids ...string) {
	t.Helper()
	for _, id := range append(ids, "orders2/0of1", "my.orders/0of1") {
		if _, err := state.Collection("watchers").InsertOne(t.Context(), bson.D{{Key: "_id", Value: id}, {Key: "fence", Value: int64(0)}}); err != nil {
			t.Fatal(err)
		}
	}
}

func fenceOf(t *testing.T, state *mongo.Database, id string) (fence int64, dirty []string) {
	t.Helper()
	var doc struct {
		Fence int64
		Dirty []string
	}
	if err := mongodb.Majority(state.Collection("watchers")).FindOne(t.Context(), bson.D{{Key: "_id", Value: id}}).Decode(&doc); err != nil {
		t.Fatal(err)
	}
	return doc.Fence, doc.Dirty
}

func TestN03_AForeignWriteTakesTheFenceOfAllSlotsAndMarksTheCollections(t *testing.T) {
	t.Parallel()
	state := database(t)
	watchers(t, state, "orders/0of2", "orders/1of2")
	// The second time, the namespaces exist already.
	for range 2 {
		err := mongodb.Foreign(t.Context(), state.Collection("watchers"), "orders", []string{"shop.outbox", "b.outbox"}, func(ctx context.Context) error {
			_, err := state.Collection("outbox").InsertOne(ctx, bson.D{})
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}

	for _, id := range []string{"orders/0of2", "orders/1of2"} {
		if fence, dirty := fenceOf(t, state, id); fence != 2 || !slices.Equal(dirty, []string{"shop.outbox", "b.outbox"}) {
			t.Errorf("%s: fence %d, dirty %v", id, fence, dirty)
		}
	}

	for _, id := range []string{"orders2/0of1", "my.orders/0of1"} {
		if fence, dirty := fenceOf(t, state, id); fence != 0 || dirty != nil {
			t.Errorf("%s is another's: fence %d, dirty %v", id, fence, dirty)
		}
	}
}

func TestN03_AForeignWriteAndTheOwnersDoNotOverlap(t *testing.T) {
	t.Parallel()
	state := database(t)
	watchers(t, state, "orders/0of1")
	outbox := state.Collection("outbox")
	// The owner's transaction has taken the fence and not committed yet.
	session, err := state.Client().StartSession()
	if err != nil {
		t.Fatal(err)
	}
	defer session.EndSession(t.Context())
	if err := session.StartTransaction(); err != nil {
		t.Fatal(err)
	}

	owner := mongo.NewSessionContext(t.Context(), session)
	if _, err := state.Collection("watchers").UpdateOne(owner, bson.D{{Key: "_id", Value: "orders/0of1"}}, bson.D{{Key: "$inc", Value: bson.D{{Key: "fence", Value: int64(1)}}}}); err != nil {
		t.Fatal(err)
	}

	var entered atomic.Bool
	done := make(chan error, 1)
	go func() {
		done <- mongodb.Foreign(t.Context(), state.Collection("watchers"), "orders", nil, func(ctx context.Context) error {
			entered.Store(true)
			n, err := outbox.CountDocuments(ctx, bson.D{})
			if err == nil && n != 1 {
				err = errors.New("the foreign write does not see the owner's write")
			}
			return err
		})
	}()

	if _, err := outbox.InsertOne(owner, bson.D{{Key: "_id", Value: "owner"}}); err != nil {
		t.Fatal(err)
	}
	if entered.Load() {
		t.Error("the foreign write ran during the owner's")
	}
	if err := session.CommitTransaction(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	if fence, _ := fenceOf(t, state, "orders/0of1"); fence != 2 {
		t.Errorf("fence %d, want one step for each", fence)
	}
}

func TestN03_AForeignWriteNeedsAWatcherAndLeavesNothingOfAFailure(t *testing.T) {
	t.Parallel()
	state := database(t)
	watchers(t, state)
	insert := func(ctx context.Context) error {
		_, err := state.Collection("outbox").InsertOne(ctx, bson.D{})
		return err
	}
	if err := mongodb.Foreign(t.Context(), state.Collection("watchers"), "orders", nil, insert); !errors.Is(err, mongodb.ErrNoWatcher) {
		t.Errorf("without a document: %v", err)
	}
	if err := mongodb.Foreign(t.Context(), state.Collection("watchers"), "o.*s", nil, insert); !errors.Is(err, mongodb.ErrNoWatcher) {
		t.Errorf("a name is no pattern: %v", err)
	}

	mine := errors.New("mine")
	if err := mongodb.Foreign(t.Context(), state.Collection("watchers"), "orders2", []string{"a.b"}, func(ctx context.Context) error { return errors.Join(insert(ctx), mine) }); !errors.Is(err, mine) {
		t.Errorf("fn's error: %v", err)
	}

	ctx, cancel := context.WithCancel(t.Context())
	if err := mongodb.Foreign(ctx, state.Collection("watchers"), "orders2", []string{"a.b"}, func(ctx context.Context) error { cancel(); return insert(ctx) }); err == nil {
		t.Error("a transaction that was called off was committed")
	}
	if exists, err := mongodb.Exists(t.Context(), state.Collection("outbox"), bson.D{}); exists || err != nil {
		t.Errorf("something was left: %v", err)
	}
	if fence, dirty := fenceOf(t, state, "orders2/0of1"); fence != 0 || dirty != nil {
		t.Errorf("fence %d, dirty %v after failures", fence, dirty)
	}
}

func TestN03_AForeignWriteIsRepeatedAfterATransientError(t *testing.T) {
	t.Parallel()
	state := database(t)
	watchers(t, state, "orders/0of1")
	client := stacktest.Client(t)
	n := 0

	err := mongodb.Foreign(t.Context(), state.Collection("watchers"), "orders", nil, func(ctx context.Context) error {
		if n++; n > 1 {
			return nil
		}

		// After the transaction's snapshot, another client writes the document that the transaction
		// is about to write.
		if _, err := client.Database(state.Name()).Collection("outbox").InsertOne(t.Context(), bson.D{{Key: "_id", Value: 1}}); err != nil {
			return err
		}
		_, err := state.Collection("outbox").UpdateOne(ctx, bson.D{{Key: "_id", Value: 1}}, bson.D{{Key: "$set", Value: bson.D{{Key: "a", Value: 1}}}})
		if err == nil {
			_, err = state.Collection("outbox").InsertOne(ctx, bson.D{{Key: "_id", Value: 1}})
		}
		return err
	})

	if err != nil || n < 2 {
		t.Errorf("%d runs, %v", n, err)
	}
	if fence, _ := fenceOf(t, state, "orders/0of1"); fence != 1 {
		t.Errorf("fence %d", fence)
	}
}
