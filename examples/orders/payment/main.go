// Payment runs a saga for the payment of each order. It requests a charge of the card, waits for
// the answer, and emits the result, even if no answer arrives.
//
//	OrderPlaced ─▶ saga starts ─▶ ChargeCard ─▶ bank ─▶ CardCharged ─▶ PaymentTaken,   the saga is complete
//	                    │                          └──▶ CardRefused ─▶ PaymentRefused, the saga is complete
//	                    └─ 15 minutes without an answer ─────────────▶ PaymentRefused, the saga is complete
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

type instance = saga.Instance[payment, string]

// buildParts defines the saga and registers it and the bank.
func buildParts(ctx context.Context, s *shop.Shop) ([]func(context.Context) error, error) {
	store, err := saga.NewMongoStore(s.DB)
	if err != nil {
		return nil, err
	}

	reg, err := saga.NewRegistry(store, saga.WithOutbox(s.Outbox))
	if err != nil {
		return nil, err
	}

	payments, err := definePayments(reg)
	if err != nil {
		return nil, err
	}
	if err := reg.Prepare(ctx); err != nil {
		return nil, err
	}

	c, err := s.Consumer("payments", "order", "payment")
	if err != nil {
		return nil, err
	}

	bank := &bank{s}
	return []func(context.Context) error{c.Run}, errors.Join(
		payments.Register(c),
		// The bank is outside of the database, so the handler must not run twice at the same time.
		// Claimed claims the message before the handler runs.
		c.Handle("charge-cards", consumer.Func(bank.chargeCard, shop.ChargeCard.Name), consumer.WithMode(consumer.Claimed)),
	)
}

// definePayments defines the messages and steps of the saga. A complete saga leaves a tombstone for
// a day, so that a late message does not start it again.
func definePayments(reg *saga.Registry) (*saga.Saga[payment, string], error) {
	s, err := saga.New[payment, string](reg, "payments", saga.WithAggregate("payment"), saga.WithTombstone(24*time.Hour))
	if err != nil {
		return nil, err
	}

	s.Start(shop.OrderPlaced.Name, saga.ByKey[string](), saga.JSON(func(_ context.Context, in *instance, o shop.Order) error {
		in.State.Cents = o.Cents
		emitCharge(in, shop.ChargeCard)
		return in.Timeout("unanswered", 15*time.Minute, event.Payload{})
	}))

	s.Handle(shop.CardCharged.Name, saga.ByHeader[string](), completeWith(shop.PaymentTaken))
	s.Handle(shop.CardRefused.Name, saga.ByHeader[string](), completeWith(shop.PaymentRefused))
	s.Timeout("unanswered", completeWith(shop.PaymentRefused))
	return s, nil
}

// completeWith returns a step that completes the saga and emits an event of this type.
func completeWith(t event.Type[shop.Charge]) saga.Func[payment, string] {
	return func(_ context.Context, in *instance, _ *consumer.Message) error {
		in.Complete()
		emitCharge(in, t)
		return nil
	}
}

// emitCharge emits an event about the charge of the order.
func emitCharge(in *instance, t event.Type[shop.Charge]) {
	in.Emit(t.New(in.ID(), shop.Charge{Order: in.ID(), Cents: in.State.Cents}))
}

// bank stands for a service that charges cards. It refuses amounts above 90.00.
type bank struct{ *shop.Shop }

// chargeCard charges the card. The answer has the id of the saga as a header, so that it can be
// correlated.
func (b *bank) chargeCard(ctx context.Context, m *consumer.Message) error {
	c, err := shop.ChargeCard.Decode(ctx, m.Value)
	if err != nil {
		return err
	}

	answer := shop.CardCharged
	if c.Cents > 9000 {
		answer = shop.CardRefused
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

	id, _ := m.Header(saga.HeaderID)
	return b.Outbox.Append(ctx, answer.New(c.Order, c, event.WithHeader(saga.HeaderID, id)))
}
