package main

import (
	"context"
	"errors"
	"strconv"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/pkg/consumer"
	"github.com/outrelay/outrelay/pkg/outbox"
	"github.com/outrelay/outrelay/pkg/servertest"
)

func TestEachOrderCountsOnce(t *testing.T) {
	t.Parallel()
	env := servertest.Start(t)
	c := env.Consumer("revenue", consumer.WithTopics(env.Topic("outbox.event.order")))
	if err := register(c, env.DB); err != nil {
		t.Fatal(err)
	}
	env.Run(c.Run)

	box, err := outbox.New(env.DB)
	if err != nil {
		t.Fatal(err)
	}
	err = box.Transaction(t.Context(), func(ctx context.Context) error {
		var errs []error
		for i := range 10 {
			errs = append(errs, box.Append(ctx, OrderPlaced.New(strconv.Itoa(i), Order{Cents: 100})))
		}
		return errors.Join(errs...)
	})
	if err != nil {
		t.Fatal(err)
	}

	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for {
		var days []struct{ Orders, Cents int64 }
		cursor, err := env.DB.Collection("revenue").Find(ctx, bson.D{})
		if err == nil {
			err = cursor.All(ctx, &days)
		}
		if err != nil {
			t.Fatal(err)
		}
		var orders, cents int64
		for _, d := range days {
			orders, cents = orders+d.Orders, cents+d.Cents
		}
		if orders == 10 && cents == 1000 {
			return
		}
		if orders > 10 {
			t.Fatalf("orders: got %d, want 10", orders)
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			t.Fatalf("orders: got %d, want 10", orders)
		}
	}
}
