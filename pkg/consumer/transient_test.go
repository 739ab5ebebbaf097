package consumer_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/pkg/consumer"
)

var errFlaky = errors.New("flaky")

func TestCodesAndLabelsMakeAnErrorTransient(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		err  error
		want bool
	}{
		{mongo.CommandError{Code: 91}, true},
		{mongo.CommandError{Code: 112, Labels: []string{"TransientTransactionError"}}, true},
		{mongo.CommandError{Labels: []string{"NetworkError"}}, true},
		{mongo.CommandError{Code: 462}, true},
		{mongo.WriteException{WriteErrors: mongo.WriteErrors{{Code: 371}}}, true},
		{mongo.WriteException{WriteErrors: mongo.WriteErrors{{Code: 14031}}}, true},
		{mongo.CommandError{Code: 1, Labels: []string{"SystemOverloadedError", "RetryableError"}}, true},
		{fmt.Errorf("x: %w", mongo.CommandError{Code: 50, Wrapped: context.DeadlineExceeded}), true},
		{mongo.WriteException{WriteErrors: mongo.WriteErrors{{Code: 11000}}}, false},
		{mongo.CommandError{Code: 13}, false},
		// The cause of the deadline is unknown.
		{context.DeadlineExceeded, false},
		{errors.New("NotWritablePrimary"), false},
		{&consumer.TimeoutError{Err: mongo.CommandError{Labels: []string{"NetworkError"}}}, false},
	} {
		if got := consumer.IsTransient(c.err); got != c.want {
			t.Errorf("isTransient of %#v: got %t, want %t", c.err, got, c.want)
		}
	}
}

func TestADatabaseThatIsAwayIsTransient(t *testing.T) {
	t.Parallel()
	c, err := mongo.Connect(options.Client().ApplyURI("mongodb://127.0.0.1:1/?serverSelectionTimeoutMS=50"))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = c.Disconnect(context.WithoutCancel(t.Context())) }()
	_, err = c.Database("db").Collection("c").InsertOne(t.Context(), bson.D{})
	if !consumer.IsTransient(errors.Join(errFlaky, fmt.Errorf("writing: %w", err))) {
		t.Errorf("%T: %v", err, err)
	}
}

// An operation that waits for a connection fails if the pool is cleared, because another one has lost its connection. The driver
// gives this error no label, and does not repeat commands such as createIndexes.
func TestALostConnectionIsTransient(t *testing.T) {
	t.Parallel()
	app := stacktest.Name(t)
	client := stacktest.Client(t, options.Client().SetAppName(app).SetMaxPoolSize(1).SetRetryWrites(false).SetRetryReads(false))
	coll := stacktest.Database(t, client).Collection("c")
	index := mongo.IndexModel{Keys: bson.D{{Key: "a", Value: 1}}}
	stacktest.FailAlways(t, app, bson.D{
		{Key: "failCommands", Value: bson.A{"find", "aggregate", "createIndexes"}},
		{Key: "closeConnection", Value: true},
		{Key: "blockConnection", Value: true},
		{Key: "blockTimeMS", Value: 300},
	})

	errs := make([]error, 8)
	var wg sync.WaitGroup
	for i := range errs {
		wg.Go(func() {
			if errs[i] = coll.FindOne(t.Context(), bson.D{}).Err(); i%2 == 0 {
				_, errs[i] = coll.Indexes().CreateOne(t.Context(), index)
			}
		})
	}
	wg.Wait()
	for _, err := range errs {
		if !consumer.IsTransient(err) {
			t.Errorf("not transient: %T: %v", err, err)
		}
	}
}
