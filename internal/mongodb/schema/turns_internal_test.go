package schema

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"testing"

	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
)

// One change of a collection runs at a time, and nothing is kept of a collection whose change has ended.
func TestTurnsAreTakenOneByOneAndForgotten(t *testing.T) {
	t.Parallel()
	client, err := mongo.Connect(options.Client().ApplyURI("mongodb://127.0.0.1:1"))
	if err != nil {
		t.Fatal(err)
	}
	coll := client.Database("turns").Collection("outbox")

	var running atomic.Int32
	var group sync.WaitGroup
	for range 20 {
		group.Go(func() {
			release, err := acquireTurn(t.Context(), coll)
			if err != nil {
				t.Error(err)
				return
			}
			if n := running.Add(1); n != 1 {
				t.Errorf("%d changes run at a time", n)
			}
			running.Add(-1)
			release()
		})
	}
	group.Wait()

	if _, kept := turns.Load("turns.outbox"); kept {
		t.Error("the collection is kept")
	}

	release, err := acquireTurn(t.Context(), coll)
	if err != nil {
		t.Fatal(err)
	}
	defer release()
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := acquireTurn(ended, coll); !errors.Is(err, context.Canceled) {
		t.Errorf("after the end of the context: %v", err)
	}
	if err := client.Disconnect(t.Context()); err != nil {
		t.Error(err)
	}
}
