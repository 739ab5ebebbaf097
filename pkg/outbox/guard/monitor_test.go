package guard_test

import (
	"context"
	"errors"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/event"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/pkg/outbox"
	"github.com/outrelay/outrelay/pkg/outbox/guard"
)

// strayed stores the reports of a Monitor.
type strayed struct {
	mu   sync.Mutex
	list []guard.Stray
}

func (s *strayed) report(_ context.Context, x guard.Stray) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.list = append(s.list, x)
}

func TestStrayWritesAreReported(t *testing.T) {
	t.Parallel()
	var found strayed
	var passed sync.Map
	b := setup(t, options.Client().SetMonitor(guard.Monitor(found.report, &event.CommandMonitor{
		Started: func(_ context.Context, e *event.CommandStartedEvent) { passed.Store(e.CommandName, true) },
	})))
	outer := t.Context()
	orders := b.db.Collection("orders")
	if err := just(orders.InsertOne(outer, id("_id", "before"))); err != nil { // no callback, no stray
		t.Fatal(err)
	}
	if err := b.box.Transaction(outer, func(ctx context.Context) error {
		return errors.Join(
			just(orders.InsertOne(ctx, id("_id", "in"))),
			just(orders.InsertOne(outer, id("_id", "stray"))),
			b.box.Transaction(ctx, func(context.Context) error {
				return just(orders.UpdateOne(outer, id("_id", "before"), id("$set", id("x", 1))))
			}),
			just(orders.InsertOne(outbox.Outside(ctx), id("_id", "meant"))),
			just(orders.CountDocuments(outer, bson.D{})),
			just(orders.Aggregate(outer, mongo.Pipeline{id("$merge", "copies")})),
			just(orders.DeleteOne(ctx, id("_id", "in"))),
		)
	}); err != nil {
		t.Fatal(err)
	}
	if err := just(orders.InsertOne(outer, id("_id", "after"))); err != nil {
		t.Fatal(err)
	}

	name := b.db.Name()
	if diff := cmp.Diff([]guard.Stray{{"insert", name, "orders"}, {"update", name, "orders"}, {"aggregate", name, "orders"}}, found.list); diff != "" {
		t.Error(diff)
	}

	if _, ok := passed.Load("commitTransaction"); !ok {
		t.Error("the next monitor sees nothing")
	}
}
