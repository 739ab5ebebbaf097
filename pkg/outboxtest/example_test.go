package outboxtest_test

import (
	"context"
	"errors"
	"testing"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/pkg/consumer"
	"github.com/outrelay/outrelay/pkg/entity"
	"github.com/outrelay/outrelay/pkg/event"
	"github.com/outrelay/outrelay/pkg/outbox"
	"github.com/outrelay/outrelay/pkg/outboxtest"
)

// Placed is the payload of OrderPlaced.
type Placed struct {
	Cents int64 `json:"cents"`
}

// OrderPlaced reports a new order.
var OrderPlaced = event.Type[Placed]{Aggregate: "order", Name: "OrderPlaced"}

// Orders is the part of the service's database that it needs.
type Orders interface {
	Insert(ctx context.Context, id string, order Placed) error
}

// MongoOrders is Orders in production: over a collection of the service's database.
type MongoOrders struct{ Collection *mongo.Collection }

// Insert stores a new order. The driver makes it part of the transaction of ctx.
func (o MongoOrders) Insert(ctx context.Context, id string, order Placed) error {
	_, err := o.Collection.InsertOne(ctx, bson.D{{Key: "_id", Value: id}, {Key: "cents", Value: order.Cents}})
	return err
}

// Both stores fit the service.
var _, _ Orders = MongoOrders{}, (*outboxtest.Table[string, Placed])(nil)

// Shop is the service under test.
type Shop struct {
	Box    *outbox.Box
	Orders Orders
}

// Place stores an order together with its event.
func (s *Shop) Place(ctx context.Context, id string, order Placed) error {
	return s.Box.Transaction(ctx, func(ctx context.Context) error {
		if err := s.Orders.Insert(ctx, id, order); err != nil {
			return err
		}
		return s.Box.Append(ctx, OrderPlaced.New(id, order))
	})
}

// TestPlace is the unit test of the service.
func TestPlace(t *testing.T) {
	t.Parallel()
	env := outboxtest.New(t)
	shop := &Shop{Box: env.Box(), Orders: outboxtest.NewTable[string, Placed](env, "orders")}
	if err := shop.Place(t.Context(), "o-1", Placed{Cents: 4200}); err != nil {
		t.Fatal(err)
	}
	if err := shop.Place(t.Context(), "o-1", Placed{Cents: 1}); err == nil {
		t.Error("a second order with the same id was accepted")
	}

	placed := outboxtest.RequireAppended(t, shop.Box, OrderPlaced, outboxtest.WithAggregateID("o-1"))
	if placed.Payload.Cents != 4200 {
		t.Errorf("cents: got %d, want 4200", placed.Payload.Cents)
	}
}

// Order is a document of the service.
type Order struct {
	ID    string `bson:"_id"`
	Cents int64  `bson:"cents"`
}

func orderID(o *Order) *string { return &o.ID }

// DocumentShop is a service that stores its documents by package entity.
type DocumentShop struct {
	Box    *outbox.Box
	Orders *entity.Collection[Order, string]
}

// Place stores an order together with its event.
func (s *DocumentShop) Place(ctx context.Context, order Order) error {
	return s.Box.Transaction(ctx, func(ctx context.Context) error {
		if _, err := s.Orders.Insert(ctx, order); err != nil {
			return err
		}
		return s.Box.Append(ctx, OrderPlaced.New(order.ID, Placed{Cents: order.Cents}))
	})
}

// TestPlaceDocument is the unit test of this service. In production, the collection of MongoDB replaces nil and the option.
func TestPlaceDocument(t *testing.T) {
	t.Parallel()
	env := outboxtest.New(t)
	orders, err := entity.New(nil, orderID, env.Entities("orders"))
	if err != nil {
		t.Fatal(err)
	}

	shop := &DocumentShop{Box: env.Box(), Orders: orders}
	if err := shop.Place(t.Context(), Order{ID: "o-1", Cents: 4200}); err != nil {
		t.Fatal(err)
	}
	if err := shop.Place(t.Context(), Order{ID: "o-1", Cents: 1}); !errors.Is(err, entity.ErrExists) {
		t.Errorf("a second order with the same id: %v", err)
	}

	placed := outboxtest.RequireAppended(t, shop.Box, OrderPlaced, outboxtest.WithAggregateID("o-1"))
	if placed.Payload.Cents != 4200 {
		t.Errorf("cents: got %d, want 4200", placed.Payload.Cents)
	}
}

// TestTotals is the unit test of a handler.
func TestTotals(t *testing.T) {
	t.Parallel()
	env := outboxtest.New(t)
	totals := outboxtest.NewTable[string, int64](env, "totals")
	c := env.Consumer("totals", consumer.WithTopics("outbox.event.order"))
	err := c.Handle("totals", consumer.For(OrderPlaced, func(ctx context.Context, _ *consumer.Message, p Placed) error {
		sum, _ := totals.Get(ctx, "all")
		return totals.Put(ctx, "all", sum+p.Cents)
	}))
	if err != nil {
		t.Fatal(err)
	}

	env.Publish(OrderPlaced.New("o-1", Placed{Cents: 100}), OrderPlaced.New("o-2", Placed{Cents: 200}))
	env.Settle()
	env.Redeliver("outbox.event.order")
	env.Settle()
	if sum, err := totals.Get(t.Context(), "all"); sum != 300 || err != nil {
		t.Errorf("total: got %d (%v), want 300", sum, err)
	}
}

// TestEachOrderHasItsEvent reads several events of one transaction.
func TestEachOrderHasItsEvent(t *testing.T) {
	t.Parallel()
	box := outboxtest.New(t).Box()
	err := box.Transaction(t.Context(), func(ctx context.Context) error {
		return box.Append(ctx, OrderPlaced.New("o-1", Placed{Cents: 100}), OrderPlaced.New("o-2", Placed{Cents: 200}))
	})
	if err != nil {
		t.Fatal(err)
	}

	outboxtest.RequireNone(t, box, OrderPlaced, outboxtest.WithAggregateID("o-3"))
	for i, placed := range outboxtest.AllAppended(t, box, OrderPlaced) {
		if want := int64(100 * (i + 1)); placed.Payload.Cents != want {
			t.Errorf("order %s: got %d cents, want %d", placed.Aggregate.ID, placed.Payload.Cents, want)
		}
	}
}
