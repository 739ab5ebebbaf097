package outbox_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/pkg/outbox"
)

// lockDocument returns a collection of the client with one document, and a function that writes the document with another client.
func lockDocument(t *testing.T, b bundle) (coll *mongo.Collection, write func() time.Duration) {
	t.Helper()
	coll = b.db.Collection("c")
	if _, err := coll.InsertOne(t.Context(), bson.D{{Key: "_id", Value: 1}}); err != nil {
		t.Fatal(err)
	}
	other := stacktest.Client(t).Database(b.db.Name()).Collection("c")
	return coll, func() time.Duration {
		t.Helper()
		// A write outside of a transaction waits for the transaction that has locked the document.
		began := time.Now()
		if _, err := other.UpdateByID(t.Context(), 1, bson.D{{Key: "$inc", Value: bson.D{{Key: "other", Value: 1}}}}); err != nil {
			t.Error(err)
		}
		return time.Since(began)
	}
}

// An HTTP handler has to return at its deadline, also if MongoDB is away.
func TestACommitEndsWithTheContextOfTheCaller(t *testing.T) {
	t.Parallel()
	for name, fault := range map[string]bson.D{
		"closed": {{Key: "closeConnection", Value: true}},
		"unknown": {
			{Key: "errorCode", Value: 91}, {Key: "errorLabels", Value: bson.A{"UnknownTransactionCommitResult", "RetryableWriteError"}},
		},
		"overloaded": {{Key: "errorCode", Value: 462}, {Key: "errorLabels", Value: bson.A{"SystemOverloadedError", "RetryableError"}}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			app := stacktest.Name(t)
			b := setup(t, options.Client().SetAppName(app))
			coll, write := lockDocument(t, b)
			stacktest.FailCommand(t, app, "alwaysOn", append(bson.D{{Key: "failCommands", Value: bson.A{"commitTransaction"}}}, fault...))

			ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
			defer cancel()
			began := time.Now()
			err := b.box.Transaction(ctx, func(ctx context.Context) error {
				_, err := coll.UpdateByID(ctx, 1, bson.D{{Key: "$set", Value: bson.D{{Key: "own", Value: 1}}}})
				return err
			})
			if took := time.Since(began); took > 15*time.Second {
				t.Errorf("Transaction returned after %v, want about 2 s", took)
			}
			if !errors.Is(err, outbox.ErrCommitUnknown) {
				t.Errorf("got %v, want %v", err, outbox.ErrCommitUnknown)
			}
			if took := write(); took > 20*time.Second {
				t.Errorf("the transaction has locked the document for %v", took)
			}
		})
	}
}

// If neither the callback nor the abort has a connection, the server would keep the locks for a minute.
func TestATransactionWhoseAbortIsLostDoesNotStayOpen(t *testing.T) {
	t.Parallel()
	app := stacktest.Name(t)
	b := setup(t, options.Client().SetAppName(app))
	coll, write := lockDocument(t, b)
	stacktest.FailCommand(t, app, "alwaysOn", bson.D{
		{Key: "failCommands", Value: bson.A{"find", "abortTransaction"}}, {Key: "closeConnection", Value: true},
	})

	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
	defer cancel()
	err := b.box.Transaction(ctx, func(ctx context.Context) error {
		if _, err := coll.UpdateByID(ctx, 1, bson.D{{Key: "$set", Value: bson.D{{Key: "own", Value: 1}}}}); err != nil {
			return err
		}
		if err := coll.FindOne(ctx, bson.D{}).Err(); !mongo.IsNetworkError(err) {
			t.Errorf("the find: got %v, want a network error", err)
		}
		return errors.Join(errors.New("the callback fails"), coll.FindOne(ctx, bson.D{}).Err())
	})
	if err == nil {
		t.Error("got no error")
	}
	if took := write(); took > 20*time.Second {
		t.Errorf("the transaction has locked the document for %v", took)
	}
	if n, err := stacktest.Client(t).Database(b.db.Name()).Collection("c").CountDocuments(t.Context(), bson.D{{Key: "own", Value: 1}}); n != 0 || err != nil {
		t.Errorf("effects of the aborted transaction: got %d (%v), want none", n, err)
	}
}
