// Payment runs a saga for the payment of each order. It requests a charge of the card, waits for
// the answer, and emits the result, even if no answer arrives.
//
//	OrderPlaced ─▶ saga starts ─▶ ChargeCard ─▶ bank ─▶ CardCharged ─▶ PaymentTaken,   the saga is complete
//	                    │                          └──▶ CardRejected ─▶ PaymentRejected, the saga is complete
//	                    └─ 15 minutes without an answer ─────────────▶ PaymentRejected, the saga is complete
//
// One transaction commits the state of the saga, the events of a step and the mark that its message
// was handled. If a second instance receives the same message, it finds the mark. If two messages
// of one saga are handled at the same time, the version of the saga makes one of them run again.
package main

import (
	"context"
	"errors"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/examples/orders/shop"
	"github.com/outrelay/outrelay/pkg/consumer"
	"github.com/outrelay/outrelay/pkg/event"
	"github.com/outrelay/outrelay/pkg/saga"
)

func main() { shop.Main(buildParts) }

// payment is the state of a saga. The id of the saga is the id of the order.
type payment struct {
	Cents int64 `bson:"cents"`
}

type instance = saga.Instance[payment]

// payments is the saga. A complete saga leaves a tombstone for a week, so that a late message does not start it again.
var payments = definePayments()

func definePayments() *saga.Saga[payment] {
	payments := saga.Define[payment]("payments", saga.WithAggregate("payment"))
	saga.Start(payments, shop.OrderPlaced, func(_ context.Context, in *instance, o shop.Order) error {
		in.State.Cents = o.Cents
		emitCharge(in, shop.ChargeCard)
		in.TimeoutIn("unanswered", 15*time.Minute)
		return nil
	})

	saga.On(payments, shop.CardCharged, completeWith(shop.PaymentTaken))
	saga.On(payments, shop.CardRejected, completeWith(shop.PaymentRejected))
	payments.Timeout("unanswered", func(ctx context.Context, in *instance) error {
		return completeWith(shop.PaymentRejected)(ctx, in, shop.Charge{})
	})
	return payments
}

// buildParts registers the saga and the bank.
func buildParts(ctx context.Context, s *shop.Shop) ([]func(context.Context) error, error) {
	h, err := payments.Handler(s.Outbox)
	if err != nil {
		return nil, err
	}

	c, err := s.Consumer("payments", "order", "payment")
	if err != nil {
		return nil, err
	}

	bank := &bank{s}
	return []func(context.Context) error{c.Run}, errors.Join(
		c.Handle(payments.Name(), h),
		// The bank is outside of the database, so the handler must not run twice at the same time: Claimed claims the message
		// before the handler runs. The claim does not make the charge happen once: after a failure or a crash, the handler runs
		// again. So the bank has to recognize the order.
		c.Handle("charge-cards", consumer.For(shop.ChargeCard, bank.chargeCard), consumer.WithMode(consumer.Claimed)),
	)
}

// completeWith returns a step that completes the saga and emits an event of this type.
func completeWith(t event.Type[shop.Charge]) saga.Step[payment, shop.Charge] {
	return func(_ context.Context, in *instance, _ shop.Charge) error {
		in.Complete()
		emitCharge(in, t)
		return nil
	}
}

// emitCharge emits an event about the charge of the order.
func emitCharge(in *instance, t event.Type[shop.Charge]) {
	in.Emit(t.New(in.ID(), shop.Charge{Order: in.ID(), Cents: in.State.Cents}))
}

// bank stands for a service that charges cards. It rejects amounts above 90.00.
type bank struct{ *shop.Shop }

// chargeCard charges the card. The answer has the id of the saga as a header.
func (b *bank) chargeCard(ctx context.Context, m *consumer.Message, c shop.Charge) error {
	answer := shop.CardCharged
	if c.Cents > 9000 {
		answer = shop.CardRejected
	}

	// The id is the one of the order, so charging an order twice would be an error.
	charge := bson.D{
		{Key: "_id", Value: c.Order},
		{Key: "cents", Value: c.Cents},
		{Key: "answer", Value: answer.Name},
	}
	if _, err := b.DB.Collection("charges").InsertOne(ctx, charge); err != nil {
		return err
	}
	return b.Outbox.Append(ctx, saga.Reply(m, answer.New(c.Order, c)))
}
