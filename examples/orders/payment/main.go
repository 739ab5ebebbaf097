// The payment program follows the payment of each order by a saga: it asks for the card to be charged, waits for the
// answer, and tells how it ended, also if no answer ever comes.
//
//	OrderPlaced ─▶ saga starts ─▶ ChargeCard ─▶ bank ─▶ CardCharged ─▶ PaymentTaken,   the saga is complete
//	                    │                          └──▶ CardRefused ─▶ PaymentRefused, the saga is complete
//	                    └─ a quarter of an hour without an answer ───▶ PaymentRefused, the saga is complete
//
// The saga's state, the events that a step emits and the mark that its message was handled are one transaction. A second
// instance that is given the same message finds the mark; two messages of one saga at once are serialised by its version.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/examples/orders/shop"
	"github.com/outrelay/outrelay/pkg/consumer"
	"github.com/outrelay/outrelay/pkg/event"
	"github.com/outrelay/outrelay/pkg/inbox"
	"github.com/outrelay/outrelay/pkg/saga"
)

func main() { shop.Main(build) }

// payment is the state of a saga. Its id is that of the order.
type payment struct {
	Cents int64 `bson:"cents"`
}

type instance = saga.Instance[payment, string]

func build(ctx context.Context, s *shop.Shop) ([]func(context.Context) error, error) {
	store, err := saga.NewMongoStore(s.DB)
	if err != nil {
		return nil, err
	}
	reg, err := saga.NewRegistry(store, saga.WithOutbox(s.Outbox))
	if err != nil {
		return nil, err
	}
	payments, err := define(reg)
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
		// The bank is outside of the database, so a handler must not begin twice at the same time: Eager claims the message
		// before it runs.
		c.Handle(shop.ChargeCard, consumer.HandlerFunc(bank.charge), consumer.Exactly(inbox.Eager)),
	)
}

// define says which messages the saga takes and what they do. A finished one leaves a tombstone for a day, so that a message
// that comes late starts nothing.
func define(reg *saga.Registry) (*saga.Saga[payment, string], error) {
	s, err := saga.New[payment, string](reg, "payments", saga.WithAggregate("payment"), saga.WithTombstone(24*time.Hour))
	if err != nil {
		return nil, err
	}
	s.Start(shop.OrderPlaced, saga.ByKey[string](), saga.JSON(func(_ context.Context, in *instance, o shop.Order) error {
		in.State.Cents = o.Cents
		return errors.Join(emit(in, shop.ChargeCard), in.Timeout("unanswered", 15*time.Minute, nil))
	}))
	s.Handle(shop.CardCharged, saga.ByHeader[string](), end(shop.PaymentTaken))
	s.Handle(shop.CardRefused, saga.ByHeader[string](), end(shop.PaymentRefused))
	s.Timeout("unanswered", end(shop.PaymentRefused))
	return s, nil
}

// end is the step that completes the saga and tells how.
func end(typ string) saga.Func[payment, string] {
	return func(_ context.Context, in *instance, _ *consumer.Message) error {
		in.Complete()
		return emit(in, typ)
	}
}

func emit(in *instance, typ string) error {
	ev, err := shop.Event("payment", in.ID(), typ, shop.Charge{Order: in.ID(), Cents: in.State.Cents})
	if err == nil {
		in.Emit(ev)
	}
	return err
}

// bank stands for a service that takes money from cards. It refuses amounts above 90.00.
type bank struct{ *shop.Shop }

// charge answers with the saga's id handed on, by which the answer finds its saga.
func (b *bank) charge(ctx context.Context, m *consumer.Message) error {
	var c shop.Charge
	if err := json.Unmarshal(m.Value, &c); err != nil {
		return err
	}
	answer := shop.CardCharged
	if c.Cents > 9000 {
		answer = shop.CardRefused
	}
	// A charge for an order that was charged before would be an error here: the _id is the order's.
	if _, err := b.DB.Collection("charges").InsertOne(ctx, bson.D{{Key: "_id", Value: c.Order}, {Key: "cents", Value: c.Cents}, {Key: "answer", Value: answer}}); err != nil {
		return err
	}
	ev, err := shop.Event("payment", c.Order, answer, c)
	if err != nil {
		return err
	}
	id, _ := m.Header(saga.HeaderID)
	return b.Outbox.Append(ctx, ev.With(event.WithHeader(saga.HeaderID, id)))
}
