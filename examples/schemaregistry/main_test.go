package main

import (
	"context"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/sr/srfake"

	"github.com/outrelay/outrelay/pkg/consumer"
	"github.com/outrelay/outrelay/pkg/servertest"
)

func TestAnAvroPayloadReachesTheHandlerTyped(t *testing.T) {
	t.Parallel()
	fake := srfake.New()
	t.Cleanup(fake.Close)
	env := servertest.Start(t)
	orderPlaced, err := declare(t.Context(), fake.URL())
	if err != nil {
		t.Fatal(err)
	}

	c := env.Consumer("billing", consumer.WithTopics(env.Topic("outbox.event.order")))
	got := make(chan Order, 1)
	raw := make(chan []byte, 1)
	err = c.Handle("invoice", consumer.For(orderPlaced, func(_ context.Context, m *consumer.Message, o Order) error {
		raw <- m.Value
		got <- o
		return nil
	}))
	if err != nil {
		t.Fatal(err)
	}
	env.Run(c.Run)
	want := Order{Cents: 4200, Currency: "CHF"}
	if err := place(t.Context(), env.DB, orderPlaced, "o-1", want); err != nil {
		t.Fatal(err)
	}

	select {
	case value := <-raw:
		if value[0] != 0 {
			t.Errorf("the record does not begin with the id of its schema: %x", value)
		}
	case <-time.After(time.Minute):
		t.Fatal("the event did not arrive")
	}
	if o := <-got; o != want {
		t.Errorf("order: got %+v, want %+v", o, want)
	}
}
