package consumer_test

import (
	"context"
	"errors"
	"log"
	"time"

	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/pkg/consumer"
	"github.com/outrelay/outrelay/pkg/consumer/deadletter"
	"github.com/outrelay/outrelay/pkg/event"
	"github.com/outrelay/outrelay/pkg/inbox"
	"github.com/outrelay/outrelay/pkg/outbox"
	"github.com/outrelay/outrelay/pkg/saga"
)

// Example_guide has the snippets of docs/consumers.md. TestSnippetsOfTheGuideAreCompiled of test/arch compares them.
func Example_guide() {
	type Placed struct{ Amount int }
	type Payment struct{ Amount int }
	type Order struct{ Amount int }
	var (
		ctx              context.Context
		db               *mongo.Database
		c                *consumer.Consumer
		box              *outbox.Box
		in               *inbox.Inbox
		payments         *mongo.Collection
		payment          Payment
		webhookID        string
		OrderPlaced      = event.Type[Placed]{Aggregate: "order", Name: "OrderPlaced"}
		TakePayment      = event.Type[Payment]{Aggregate: "order", Name: "TakePayment"}
		PaymentTaken     = event.Type[Payment]{Aggregate: "order", Name: "PaymentTaken"}
		ErrNoSuchArticle = errors.New("no such article")
		pack             func(ctx context.Context, m *consumer.Message, p Placed) error
	)

	failures := func() error {
		err := c.Handle("pack-parcels", consumer.For(OrderPlaced, pack),
			consumer.WithRetry(consumer.Retry{Max: time.Minute, GiveUpAfter: 72 * time.Hour}),
			consumer.WithRetryFor(consumer.ErrorIs(ErrNoSuchArticle), consumer.NoRetry()))
		return err
	}

	letters := func() error {
		desk, err := deadletter.New(db)
		if err != nil {
			return err
		}
		n, err := desk.Requeue(ctx, deadletter.Query{Group: "shipping", Handler: "pack-parcels", Class: deadletter.ClassHandler},
			deadletter.RequeueOptions{Actor: "ann", Note: "the printer is repaired"})
		log.Print(n, " letters go back")
		return err
	}

	webhooks := func() (err error) {
		err = in.Once(ctx, inbox.Key{Scope: "payments", ID: webhookID}, func(ctx context.Context) error {
			_, err := payments.InsertOne(ctx, payment)
			return err
		})
		return err
	}

	sagas := func() error {
		orders := saga.Define[Order]("order_sagas")
		saga.Start(orders, OrderPlaced, func(ctx context.Context, o *saga.Instance[Order], p Placed) error {
			o.State.Amount = p.Amount
			o.Emit(TakePayment.New(o.ID(), Payment(p)))
			o.TimeoutIn("unpaid", 15*time.Minute)
			return nil
		})
		saga.On(orders, PaymentTaken, func(ctx context.Context, o *saga.Instance[Order], p Payment) error {
			o.Complete()
			return nil
		})
		orders.Timeout("unpaid", func(context.Context, *saga.Instance[Order]) error { return nil })
		h, err := orders.Handler(box)
		if err != nil {
			return err
		}
		err = c.Handle(orders.Name(), h)
		return err
	}

	for _, run := range []func() error{failures, letters, webhooks, sagas} {
		if err := run(); err != nil {
			log.Fatal(err)
		}
	}
}
