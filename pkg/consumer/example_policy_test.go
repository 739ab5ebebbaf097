package consumer_test

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/outrelay/outrelay/pkg/consumer"
	"github.com/outrelay/outrelay/pkg/event"
)

var errGatewayAway = errors.New("the payment gateway is away")

// A policy is read from top to bottom; what no rule matches is decided by the default policy.
func ExampleNewPolicy() {
	policy := consumer.NewPolicy(
		consumer.On(consumer.Is(errGatewayAway)).Retry(2, 100*time.Millisecond).RetryTopic(30*time.Second, 10*time.Minute).DeadLetter(),
		consumer.On(consumer.As[*consumer.ExpiredError]()).Discard(),
	)
	m := &consumer.Message{Topic: "orders", Group: "billing", Attempt: 1}
	var a consumer.Attempts
	for range 5 {
		a = a.Note(errGatewayAway, m, time.Now())
		v := policy.Decide(fmt.Errorf("charging: %w", errGatewayAway), m, a)
		fmt.Printf("%s after %s %q\n", v.Action, v.Delay, v.Topic)
	}
	// Output:
	// retry_inline after 100ms ""
	// retry_inline after 100ms ""
	// retry_topic after 30s "orders.billing.retry.1"
	// retry_topic after 10m0s "orders.billing.retry.2"
	// dead_letter after 0s ""
}

// Middleware sees each event before it is stored, in the transaction of the call.
func ExampleEmitter() {
	var box fakeBox // in a service: outbox.New(db)
	marked := func(next consumer.Emit) consumer.Emit {
		return func(ctx context.Context, ev event.Event) error {
			if ev.Name() == "Debug" {
				return consumer.ErrDrop
			}
			return next(ctx, ev.With(event.WithHeader("tenant", []byte("acme"))))
		}
	}
	events, err := consumer.NewEmitter(&box, consumer.EmitVia(marked), consumer.BatchLimit(100))
	if err != nil {
		fmt.Println(err)
		return
	}
	about := event.Aggregate{Type: "order", ID: "1"}
	err = events.Append(context.Background(), event.New(about, "OrderPlaced", event.JSON("…")), event.New(about, "Debug", event.JSON("…")))
	fmt.Println(err, len(box.calls[0]), box.calls[0][0].Name(), box.calls[0][0].Headers())
	// Output:
	// <nil> 1 OrderPlaced [{tenant [97 99 109 101]}]
}
