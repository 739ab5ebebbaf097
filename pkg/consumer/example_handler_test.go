package consumer_test

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/outrelay/outrelay/pkg/consumer"
	"github.com/outrelay/outrelay/pkg/event"
)

type order struct {
	Customer string `json:"customer"`
}

// The types of events that producer and consumer share.
var (
	orderPlaced  = event.Type[order]{Aggregate: "order", Name: "OrderPlaced"}
	orderDropped = event.Type[order]{Aggregate: "order", Name: "OrderDropped"}
)

// A typed handler gets the decoded payload. Its unit test needs no servers.
func ExampleFor() {
	h := consumer.For(orderPlaced, func(_ context.Context, m *consumer.Message, o order) error {
		fmt.Println(m.ID, "is an order of", o.Customer)
		return nil
	})

	// In a service: c.Handle("pack-parcels", h).
	ctx := context.Background()
	fmt.Println(h.Handle(ctx, &consumer.Message{ID: "1", Name: "OrderPlaced", Value: []byte(`{"customer": "ann"}`)}))
	err := h.Handle(ctx, &consumer.Message{ID: "2", Name: "OrderPlaced", Value: []byte(`{`)})
	fmt.Println(errors.Is(err, consumer.ErrMalformed))
	// Output:
	// 1 is an order of ann
	// <nil>
	// true
}

// Handlers of several types under one name share one order for each key: an order is never dropped before it is placed.
func ExampleMux() {
	h := consumer.Mux(
		consumer.For(orderPlaced, func(_ context.Context, _ *consumer.Message, o order) error {
			fmt.Println("packing for", o.Customer)
			return nil
		}),
		consumer.For(orderDropped, func(_ context.Context, _ *consumer.Message, o order) error {
			fmt.Println("unpacking for", o.Customer)
			return nil
		}))

	// In a service: c.Handle("parcels", h).
	for _, name := range []string{"OrderPlaced", "OrderDropped"} {
		if err := h.Handle(context.Background(), &consumer.Message{Name: name, Value: []byte(`{"customer": "ann"}`)}); err != nil {
			fmt.Println(err)
		}
	}
	// Output:
	// packing for ann
	// unpacking for ann
}

// A typed batch handler gets the decoded payloads of one transaction at once, for example for one bulk write.
func ExampleBatchFor() {
	h := consumer.BatchFor(0, orderPlaced, func(_ context.Context, orders []consumer.Typed[order]) error {
		for _, placed := range orders {
			fmt.Println(placed.ID, "is an order of", placed.Payload.Customer)
		}
		return nil
	})

	// In a service: c.Handle("pack-parcels", h).
	fmt.Println(h.Handle(context.Background(), &consumer.Message{ID: "1", Name: "OrderPlaced", Value: []byte(`{"customer": "ann"}`)}))
	// Output:
	// 1 is an order of ann
	// <nil>
}

// A batch handler gets the messages of one transaction at once, for example for one bulk write.
func ExampleBatch() {
	h := consumer.Batch(0, func(_ context.Context, ms []*consumer.Message) error {
		fmt.Println(len(ms), "messages, the first is", ms[0].Name)
		return nil
	}, "order.*")

	// In a service: c.Handle("count-orders", h, consumer.WithSharedTransaction(100)).
	if err := h.Handle(context.Background(), &consumer.Message{Name: "order.placed"}); err != nil {
		fmt.Println(err)
	}
	// Output:
	// 1 messages, the first is order.placed
}

// A warehouse that is counting its stock is called again in ten minutes. Other keys continue.
func ExampleRetryIn() {
	errCounting := errors.New("the warehouse counts its stock")
	h := consumer.For(orderPlaced, func(context.Context, *consumer.Message, order) error {
		return consumer.RetryIn(10*time.Minute, errCounting)
	})

	err := h.Handle(context.Background(), &consumer.Message{Name: "OrderPlaced", Value: []byte(`{"customer": "ann"}`)})
	fmt.Println(errors.Is(err, errCounting))
	// Output: true
}

// At a rate limit, more attempts would make it worse: the handler takes no message for the time that the service named.
func ExampleSuspend() {
	h := consumer.Func(func(context.Context, *consumer.Message) error {
		return consumer.Suspend(30*time.Second, errors.New("429 Too Many Requests"))
	}, "OrderPlaced")

	fmt.Println(h.Handle(context.Background(), &consumer.Message{}))
	// Output: the handler requested a suspension for 30s: 429 Too Many Requests
}

// An event that is of no use any more is skipped. The writes of the handler are rolled back.
func ExampleDiscard() {
	errOld := errors.New("the offer has ended")
	h := consumer.Func(func(context.Context, *consumer.Message) error { return consumer.Discard(errOld) }, "OfferPlaced")

	fmt.Println(errors.Is(h.Handle(context.Background(), &consumer.Message{}), errOld))
	// Output: true
}

// A handler decides about its message by the error that it returns.
func ExampleReject() {
	errLimited, errBanned := errors.New("too many requests"), errors.New("the customer is banned")
	h := consumer.Func(func(_ context.Context, m *consumer.Message) error {
		switch string(m.Key) {
		case "limited":
			return consumer.Suspend(0, errLimited)
		case "banned":
			return consumer.Reject(errBanned)
		}
		return nil
	}, "OrderPlaced")

	for _, key := range []string{"limited", "banned", "ann"} {
		fmt.Println(h.Handle(context.Background(), &consumer.Message{Key: []byte(key)}))
	}
	// Output:
	// the handler requested a suspension for 0s: too many requests
	// the handler rejected the message: the customer is banned
	// <nil>
}
