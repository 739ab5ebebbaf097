package main

import (
	"context"
	"slices"
	"testing"
	"time"

	"github.com/outrelay/outrelay/pkg/consumer"
	"github.com/outrelay/outrelay/pkg/outbox"
	"github.com/outrelay/outrelay/pkg/outboxtest"
	"github.com/outrelay/outrelay/pkg/servertest"
)

// The bank charges the small order. The large one is cancelled after the timeout, and its goods are released.
func TestAnOrderIsPaidOrCancelled(t *testing.T) {
	t.Parallel()
	env := servertest.Start(t)
	box, err := outbox.New(env.DB)
	if err != nil {
		t.Fatal(err)
	}

	c := env.Consumer("payments", consumer.WithTopics(env.Topic("outbox.event.order"), env.Topic("outbox.event.payment")))
	if err := register(t.Context(), c, box, 2*time.Second); err != nil {
		t.Fatal(err)
	}
	results := make(chan string, 4)
	err = c.Handle("results", consumer.Func(func(_ context.Context, m *consumer.Message) error {
		results <- m.Name + " " + m.Aggregate.ID
		return nil
	}, OrderPaid.Name, OrderCancelled.Name))
	if err != nil {
		t.Fatal(err)
	}
	env.Run(c.Run)

	err = box.Transaction(t.Context(), func(ctx context.Context) error {
		return box.Append(ctx, OrderPlaced.New("small", Order{"small", 4200}), OrderPlaced.New("large", Order{"large", 9900}))
	})
	if err != nil {
		t.Fatal(err)
	}

	var got []string
	for range 2 {
		select {
		case r := <-results:
			got = append(got, r)
		case <-time.After(time.Minute):
			t.Fatalf("results: got %q, want two", got)
		}
	}
	slices.Sort(got)
	if want := []string{"OrderCancelled large", "OrderPaid small"}; !slices.Equal(got, want) {
		t.Errorf("results: got %q, want %q", got, want)
	}
	outboxtest.RequireAppended(t, box, ReleaseGoods, outboxtest.WithAggregateID("large"))
	outboxtest.RequireNone(t, box, ReleaseGoods, outboxtest.WithAggregateID("small"))
}
