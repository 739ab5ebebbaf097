package transaction_test

import (
	"context"
	"errors"
	"sync"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/mongodb/transaction"
)

var errWanted = errors.New("as wanted")

// A pool lends a session to one transaction at a time, keeps it afterwards, and lends it to nothing else.
func TestAPoolKeepsItsSessions(t *testing.T) {
	t.Parallel()
	client := stacktest.Client(t)
	coll := stacktest.Database(t, client).Collection("docs")
	if err := coll.Database().CreateCollection(t.Context(), "docs"); err != nil {
		t.Fatal(err)
	}
	pool := transaction.NewPool(client)
	var mu sync.Mutex
	used := map[string]bool{}
	const together = 5

	run := func(result error) {
		t.Helper()
		var begun, done sync.WaitGroup
		begun.Add(together)
		for range together {
			done.Go(func() {
				first := true
				err := pool.Run(t.Context(), func(ctx context.Context) error {
					if first {
						begun.Done()
						begun.Wait()
					}
					first = false
					mu.Lock()
					used[mongo.SessionFromContext(ctx).ID().String()] = true
					mu.Unlock()
					if _, err := coll.InsertOne(ctx, bson.D{{Key: "x", Value: 1}}); err != nil {
						return err
					}
					// A part of the transaction stays in its session.
					return errors.Join(result, pool.Run(ctx, func(context.Context) error { return nil }))
				})
				if !errors.Is(err, result) {
					t.Errorf("got %v, want %v", err, result)
				}
			})
		}
		done.Wait()
	}
	for range 3 {
		run(nil)
		run(errWanted)
	}
	if len(used) != together {
		t.Errorf("%d sessions for %d transactions at once", len(used), together)
	}
	if n, err := coll.CountDocuments(t.Context(), bson.D{}); err != nil || n != 3*together {
		t.Errorf("%d documents, %v", n, err)
	}

	for range 2 * together {
		sess, err := client.StartSession()
		if err != nil {
			t.Fatal(err)
		}
		defer sess.EndSession(t.Context())
		if used[sess.ID().String()] {
			t.Error("the driver lends a session of the pool")
		}
	}
}

// A callback that panics leaves no transaction open in a session of the pool.
func TestAPanicLeavesNoTransactionOpen(t *testing.T) {
	t.Parallel()
	client := stacktest.Client(t)
	coll := stacktest.Database(t, client).Collection("docs")
	if err := coll.Database().CreateCollection(t.Context(), "docs"); err != nil {
		t.Fatal(err)
	}
	pool := transaction.NewPool(client)
	insert := func(ctx context.Context) {
		if _, err := coll.InsertOne(ctx, bson.D{{Key: "_id", Value: 1}}); err != nil {
			t.Error(err)
		}
	}
	func() {
		defer func() {
			if recover() == nil {
				t.Error("no panic")
			}
		}()
		_ = pool.Run(t.Context(), func(ctx context.Context) error {
			insert(ctx)
			panic("as wanted")
		})
	}()

	// An open transaction would lock the document for a minute.
	insert(t.Context())
}

// A callback that ends the session which it gets, as programs of the driver do, fails alone: the next transaction has another session.
func TestAPoolGivesUpASessionThatACallbackEnds(t *testing.T) {
	t.Parallel()
	client := stacktest.Client(t)
	coll := stacktest.Database(t, client).Collection("docs")
	pool := transaction.NewPool(client)
	insert := func(ctx context.Context) error {
		_, err := coll.InsertOne(ctx, bson.D{})
		return err
	}

	err := pool.Run(t.Context(), func(ctx context.Context) error {
		defer mongo.SessionFromContext(ctx).EndSession(ctx)
		return insert(ctx)
	})
	if !errors.Is(err, transaction.ErrEnded) {
		t.Errorf("got %v, want %v", err, transaction.ErrEnded)
	}

	if err := pool.Run(t.Context(), insert); err != nil {
		t.Errorf("the next transaction: %v", err)
	}
	if n, err := coll.CountDocuments(t.Context(), bson.D{}); err != nil || n != 1 {
		t.Errorf("%d documents, %v", n, err)
	}
}

// If neither the callback, the abort nor the end of the session has a connection, the server would keep the locks for a minute.
func TestATransactionOfAPoolWhoseAbortIsLostDoesNotStayOpen(t *testing.T) {
	t.Parallel()
	app := stacktest.Name(t)
	client := stacktest.Client(t, options.Client().SetAppName(app))
	coll := stacktest.Database(t, client).Collection("docs")
	if _, err := coll.InsertOne(t.Context(), bson.D{{Key: "_id", Value: 1}}); err != nil {
		t.Fatal(err)
	}
	change := func(ctx context.Context, coll *mongo.Collection, field string) error {
		_, err := coll.UpdateByID(ctx, 1, bson.D{{Key: "$set", Value: bson.D{{Key: field, Value: 1}}}})
		return err
	}

	pool := transaction.NewPool(client)
	_, repair := stacktest.FailAlways(t, app, bson.D{
		{Key: "failCommands", Value: bson.A{"find", "abortTransaction", "killSessions"}}, {Key: "closeConnection", Value: true},
	})
	err := pool.Run(t.Context(), func(ctx context.Context) error {
		return errors.Join(change(ctx, coll, "own"), coll.FindOne(ctx, bson.D{}).Err())
	})
	if !mongo.IsNetworkError(err) {
		t.Errorf("got %v, want a network error", err)
	}
	repair()

	// A write outside of a transaction waits for the transaction that has locked the document.
	began := time.Now()
	other := stacktest.Client(t).Database(coll.Database().Name()).Collection(coll.Name())
	if err := change(t.Context(), other, "other"); err != nil {
		t.Error(err)
	}
	if took := time.Since(began); took > 20*time.Second {
		t.Errorf("the transaction has locked the document for %v", took)
	}
	if err := pool.Run(t.Context(), func(ctx context.Context) error { return change(ctx, coll, "again") }); err != nil {
		t.Errorf("the next transaction: %v", err)
	}
	if n, err := other.CountDocuments(t.Context(), bson.D{{Key: "own", Value: 1}}); n != 0 || err != nil {
		t.Errorf("effects of the aborted transaction: got %d (%v), want none", n, err)
	}
}
