// Saga pays orders. A saga reserves the goods of an order, asks a bank for the payment, and waits for the answer. If the bank
// does not answer in time, the saga releases the goods and cancels the order. This bank does not answer requests above 90.00.
//
//	go run ./cmd/outrelay dev --keep   # prints the addresses of its servers
//	MONGODB_URI=… KAFKA_BROKERS=… go run ./examples/saga
//
// The program places one order that the bank charges and one that it does not, and prints what becomes of them.
package main

import (
	"context"
	"errors"
	"log"
	"time"

	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/examples/local"
	"github.com/outrelay/outrelay/pkg/consumer"
	"github.com/outrelay/outrelay/pkg/event"
	"github.com/outrelay/outrelay/pkg/outbox"
	"github.com/outrelay/outrelay/pkg/saga"
)

// Order is the payload of all events.
type Order struct {
	ID    string `json:"id"`
	Cents int64  `json:"cents"`
}

// Types of events. The last three are commands.
var (
	OrderPlaced    = event.Type[Order]{Aggregate: "order", Name: "OrderPlaced"}
	OrderPaid      = event.Type[Order]{Aggregate: "order", Name: "OrderPaid"}
	OrderCancelled = event.Type[Order]{Aggregate: "order", Name: "OrderCancelled"}
	CardCharged    = event.Type[Order]{Aggregate: "payment", Name: "CardCharged"}
	ChargeCard     = event.Type[Order]{Aggregate: "payment", Name: "ChargeCard"}
	ReserveGoods   = event.Type[Order]{Aggregate: "stock", Name: "ReserveGoods"}
	ReleaseGoods   = event.Type[Order]{Aggregate: "stock", Name: "ReleaseGoods"}
)

// bankLimit is the largest amount that the bank charges.
const bankLimit = 9000

func main() {
	local.Main(func(ctx context.Context, db *mongo.Database) error {
		box, err := outbox.New(db)
		if err != nil {
			return err
		}
		c, err := consumer.New("shop.payments", db, consumer.WithBrokers(local.Brokers()...),
			consumer.WithTopics("outbox.event.order", "outbox.event.payment"))
		if err != nil {
			return err
		}

		err = errors.Join(
			register(ctx, c, box, 10*time.Second),
			c.Handle("results", consumer.Func(printResult, OrderPaid.Name, OrderCancelled.Name)),
		)
		if err != nil {
			return err
		}

		id := time.Now().Format("150405")
		err = box.Transaction(ctx, func(ctx context.Context) error {
			small, large := "small-"+id, "large-"+id
			return box.Append(ctx, OrderPlaced.New(small, Order{small, 4200}), OrderPlaced.New(large, Order{large, 9900}))
		})
		if err != nil {
			return err
		}
		return c.Run(ctx)
	})
}

func printResult(_ context.Context, m *consumer.Message) error {
	log.Printf("%s: %s", m.Name, m.Value)
	return nil
}

// register adds the saga and the bank to the consumer. An order is cancelled if it is not paid after this patience.
func register(ctx context.Context, c *consumer.Consumer, box *outbox.Box, patience time.Duration) error {
	// The timeouts are events of the aggregate payment, so they need no further topic.
	payments := saga.Define[Order]("payments", saga.WithAggregate("payment"))

	saga.Start(payments, OrderPlaced, func(_ context.Context, in *saga.Instance[Order], o Order) error {
		in.State = o
		in.Emit(ReserveGoods.New(o.ID, o), ChargeCard.New(o.ID, o))
		in.OnCompensate(ReleaseGoods.New(o.ID, o))
		in.TimeoutIn("unpaid", patience)
		return nil
	})

	// Complete cancels the timeout and forgets the compensation.
	saga.On(payments, CardCharged, func(_ context.Context, in *saga.Instance[Order], _ Order) error {
		in.Emit(OrderPaid.New(in.ID(), in.State))
		in.Complete()
		return nil
	})

	payments.Timeout("unpaid", func(_ context.Context, in *saga.Instance[Order]) error {
		in.Compensate()
		in.Emit(OrderCancelled.New(in.ID(), in.State))
		in.Complete()
		return nil
	})

	h, err := payments.Handler(box)
	if err != nil {
		return err
	}
	return errors.Join(
		c.Handle(payments.Name(), h),
		c.Handle("bank", consumer.For(ChargeCard, func(ctx context.Context, m *consumer.Message, o Order) error {
			if o.Cents > bankLimit {
				return nil
			}
			return box.Append(ctx, saga.Reply(m, CardCharged.New("charge-"+o.ID, o)))
		})),
	)
}
