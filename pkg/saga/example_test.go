package saga_test

import (
	"context"
	"fmt"
	"time"

	"github.com/outrelay/outrelay/internal/lab/memory"
	"github.com/outrelay/outrelay/pkg/consumer"
	"github.com/outrelay/outrelay/pkg/event"
	"github.com/outrelay/outrelay/pkg/outbox"
	"github.com/outrelay/outrelay/pkg/saga"
)

// Types of events of a shop.
var (
	OrderPlaced   = event.Type[Placed]{Aggregate: "order", Name: "OrderPlaced"}
	PaymentTaken  = event.Type[Payment]{Aggregate: "payment", Name: "PaymentTaken"}
	PaymentWanted = event.Type[Payment]{Aggregate: "payment", Name: "PaymentWanted"}
	GoodsReleased = event.Type[Payment]{Aggregate: "stock", Name: "GoodsReleased"}
)

// Placed is the payload of OrderPlaced.
type Placed struct {
	Order string `json:"order"`
	Cents int    `json:"cents"`
}

// Payment is the payload of events about payments.
type Payment struct {
	Order string `json:"order"`
	Cents int    `json:"cents"`
	Part  int64  `json:"part,omitempty"`
}

// Purchase is the state of the saga in the examples.
type Purchase struct {
	Cents int
	Paid  int
}

// deliver passes events to a saga, as a consumer does with the events of its topics. It prints the state after each event.
func deliver[S any](s *saga.Saga[S], events ...event.Event) {
	box := exampleBox()
	h, err := s.Handler(box)
	if err != nil {
		fmt.Println(err)
		return
	}

	for _, ev := range events {
		value, _ := ev.Payload()
		m := &consumer.Message{ID: ev.ID().String(), Name: ev.Name(), Aggregate: ev.Aggregate(), Headers: ev.Headers(), Value: value}
		if err := h.Handle(context.Background(), m); err != nil {
			fmt.Println(ev.Name(), "fails:", err)
			continue
		}
		for got := range saga.NewDesk(box).Recent(context.Background(), s.Name()) {
			fmt.Printf("%s: %s is %s\n", ev.Name(), got.ID, got.State)
		}
	}
}

// exampleBox returns an outbox in memory. A service calls outbox.New.
func exampleBox() *outbox.Box {
	box, err := memory.NewOutbox(memory.NewDB())
	if err != nil {
		panic(err)
	}
	return box
}

// A purchase waits for its payment. If none arrives within 15 minutes, the goods are released.
func ExampleDefine() {
	purchases := saga.Define[Purchase]("purchases", saga.WithTombstone(24*time.Hour))

	saga.Start(purchases, OrderPlaced, func(_ context.Context, in *saga.Instance[Purchase], p Placed) error {
		in.State.Cents = p.Cents
		in.Emit(PaymentWanted.New(in.ID(), Payment{Order: in.ID(), Cents: p.Cents}))
		in.OnCompensate(GoodsReleased.New(in.ID(), Payment{Order: in.ID()}))
		in.TimeoutIn("unpaid", 15*time.Minute)
		return nil
	})
	saga.On(purchases, PaymentTaken, func(_ context.Context, in *saga.Instance[Purchase], p Payment) error {
		in.State.Paid = p.Cents
		in.Complete() // this cancels the timeout
		return nil
	})
	purchases.Timeout("unpaid", func(_ context.Context, in *saga.Instance[Purchase]) error {
		in.Compensate()
		in.Complete()
		return nil
	})

	deliver(purchases,
		OrderPlaced.New("o-1", Placed{Order: "o-1", Cents: 500}),
		PaymentTaken.New("o-1", Payment{Order: "o-1", Cents: 500}))
	// Output:
	// OrderPlaced: o-1 is {"cents":500,"paid":0}
	// PaymentTaken: o-1 is {"cents":500,"paid":500}
}

// A repeated start changes nothing.
func ExampleStart() {
	purchases := saga.Define[Purchase]("purchases")
	saga.Start(purchases, OrderPlaced, func(_ context.Context, in *saga.Instance[Purchase], p Placed) error {
		in.State.Cents += p.Cents
		return nil
	})

	deliver(purchases, OrderPlaced.New("o-1", Placed{Cents: 500}), OrderPlaced.New("o-1", Placed{Cents: 500}))
	// Output:
	// OrderPlaced: o-1 is {"cents":500,"paid":0}
	// OrderPlaced: o-1 is {"cents":500,"paid":0}
}

// The answer of a bank is about a charge. Its header names the saga, because the bank used Reply.
func ExampleOn() {
	charged := event.Type[Payment]{Aggregate: "charge", Name: "CardCharged"}
	purchases := saga.Define[Purchase]("purchases")
	saga.Start(purchases, OrderPlaced, func(_ context.Context, in *saga.Instance[Purchase], p Placed) error {
		in.State.Cents = p.Cents
		return nil
	})
	saga.On(purchases, charged, func(_ context.Context, in *saga.Instance[Purchase], p Payment) error {
		in.State.Paid += p.Cents
		return nil
	})

	deliver(purchases,
		OrderPlaced.New("o-1", Placed{Cents: 500}),
		charged.New("charge-7", Payment{Cents: 500}, event.WithHeader(saga.HeaderID, []byte("o-1"))))
	// Output:
	// OrderPlaced: o-1 is {"cents":500,"paid":0}
	// CardCharged: o-1 is {"cents":500,"paid":500}
}

// The payment may arrive before the order.
func ExampleStartOrOn() {
	purchases := saga.Define[Purchase]("purchases")
	saga.StartOrOn(purchases, OrderPlaced, func(_ context.Context, in *saga.Instance[Purchase], p Placed) error {
		in.State.Cents = p.Cents
		return nil
	})
	saga.StartOrOn(purchases, PaymentTaken, func(_ context.Context, in *saga.Instance[Purchase], p Payment) error {
		in.State.Paid += p.Cents
		return nil
	})

	deliver(purchases, PaymentTaken.New("o-1", Payment{Cents: 500}), OrderPlaced.New("o-1", Placed{Cents: 500}))
	// Output:
	// PaymentTaken: o-1 is {"cents":0,"paid":500}
	// OrderPlaced: o-1 is {"cents":500,"paid":500}
}

// A payment without an order would fail with ErrNotFound, and be tried again until its order arrives.
func ExampleMissing() {
	purchases := saga.Define[Purchase]("purchases")
	saga.Start(purchases, OrderPlaced, func(context.Context, *saga.Instance[Purchase], Placed) error { return nil })
	saga.On(purchases, PaymentTaken, func(context.Context, *saga.Instance[Purchase], Payment) error { return nil })
	saga.Missing(purchases, PaymentTaken, func(_ context.Context, id string, p Payment) error {
		fmt.Printf("no order %s: refund %d cents\n", id, p.Cents)
		return nil
	})

	deliver(purchases, PaymentTaken.New("o-9", Payment{Cents: 500}))
	// Output: no order o-9: refund 500 cents
}

// The aggregate of the event is the payment, and its payload contains the order.
func ExampleBy() {
	purchases := saga.Define[Purchase]("purchases")
	saga.StartOrOn(purchases, PaymentTaken, func(_ context.Context, in *saga.Instance[Purchase], p Payment) error {
		in.State.Paid += p.Cents
		return nil
	}, saga.By(func(p Payment) string { return p.Order }))

	deliver(purchases,
		PaymentTaken.New("payment-1", Payment{Order: "o-1", Cents: 200}),
		PaymentTaken.New("payment-2", Payment{Order: "o-1", Cents: 300}))
	// Output:
	// PaymentTaken: o-1 is {"cents":0,"paid":200}
	// PaymentTaken: o-1 is {"cents":0,"paid":500}
}

// The second part arrives first, and waits for the first one.
func ExampleSequenced() {
	purchases := saga.Define[Purchase]("purchases")
	saga.StartOrOn(purchases, PaymentTaken, func(_ context.Context, in *saga.Instance[Purchase], p Payment) error {
		in.State.Paid += p.Cents
		fmt.Println("part", p.Part)
		return nil
	}, saga.Sequenced(func(p Payment) int64 { return p.Part }))

	deliver(purchases, PaymentTaken.New("o-1", Payment{Cents: 300, Part: 2}), PaymentTaken.New("o-1", Payment{Cents: 200, Part: 1}))
	// Output:
	// PaymentTaken: o-1 is {"cents":0,"paid":0}
	// part 1
	// part 2
	// PaymentTaken: o-1 is {"cents":0,"paid":500}
}

// A service answers an event of a saga.
func ExampleReply() {
	question := &consumer.Message{Name: "PaymentWanted", Headers: []event.Header{{Key: saga.HeaderID, Value: []byte("o-1")}}}
	answer := saga.Reply(question, PaymentTaken.New("payment-1", Payment{Cents: 500}))

	id, _ := answer.Header(saga.HeaderID)
	fmt.Printf("%s for the saga %s\n", answer.Name(), id)
	// Output: PaymentTaken for the saga o-1
}

func ExampleNewDesk() {
	ctx, box := context.Background(), exampleBox()
	purchases := saga.Define[Purchase]("purchases")
	saga.Start(purchases, OrderPlaced, func(_ context.Context, in *saga.Instance[Purchase], p Placed) error {
		in.State.Cents = p.Cents
		return nil
	})
	h, err := purchases.Handler(box)
	if err != nil {
		fmt.Println(err)
	}
	placed := &consumer.Message{Name: "OrderPlaced", Aggregate: event.Aggregate{Type: "order", ID: "o-1"}, Value: []byte(`{"cents":500}`)}
	if err := h.Handle(ctx, placed); err != nil {
		fmt.Println(err)
	}

	got, err := saga.NewDesk(box).Get(ctx, saga.Ref{Saga: "purchases", ID: "o-1"})
	fmt.Printf("version %d: %s %v\n", got.Version, got.State, err)
	// Output: version 1: {"cents":500,"paid":0} <nil>
}
