package servertest_test

import (
	"context"
	"testing"

	"github.com/outrelay/outrelay/pkg/consumer"
	"github.com/outrelay/outrelay/pkg/event"
	"github.com/outrelay/outrelay/pkg/outbox"
	"github.com/outrelay/outrelay/pkg/servertest"
)

// Placed is the payload of OrderPlaced.
type Placed struct {
	Cents int64 `json:"cents"`
}

// OrderPlaced reports a new order.
var OrderPlaced = event.Type[Placed]{Aggregate: "order", Name: "OrderPlaced"}

// TestOrdersReachShipping is the integration test of a service: from the transaction that appends an event to the handler.
func TestOrdersReachShipping(t *testing.T) {
	t.Parallel()
	env := servertest.Start(t)
	box, err := outbox.New(env.DB)
	if err != nil {
		t.Fatal(err)
	}

	shipped := make(chan Placed, 1)
	c := env.Consumer("shipping", consumer.WithTopics(env.Topic("outbox.event.order")))
	if err := c.Handle("ship", consumer.For(OrderPlaced, func(_ context.Context, _ *consumer.Message, p Placed) error {
		shipped <- p
		return nil
	})); err != nil {
		t.Fatal(err)
	}

	env.Run(c.Run)
	if err := box.Transaction(t.Context(), func(ctx context.Context) error {
		return box.Append(ctx, OrderPlaced.New("o-1", Placed{Cents: 4200}))
	}); err != nil {
		t.Fatal(err)
	}
	if got := <-shipped; got.Cents != 4200 {
		t.Errorf("cents: got %d, want 4200", got.Cents)
	}
}
