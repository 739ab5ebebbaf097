package saga_test

import (
	"context"
	"time"

	"github.com/google/uuid"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/pkg/consumer"
	"github.com/outrelay/outrelay/pkg/event"
	"github.com/outrelay/outrelay/pkg/outbox"
	"github.com/outrelay/outrelay/pkg/saga"
)

// Purchase is the state of the saga in the example.
type Purchase struct {
	Amount int
	Paid   bool
}

// Placed is the payload of OrderPlaced.
type Placed struct {
	OrderID uuid.UUID
	Amount  int
}

// A purchase waits for its payment, and is canceled if none arrives within 15 minutes.
func Example() {
	register := func(ctx context.Context, db *mongo.Database, box *outbox.Box, c *consumer.Consumer) error {
		store, err := saga.NewMongoStore(db)
		if err != nil {
			return err
		}

		reg, err := saga.NewRegistry(store, saga.WithOutbox(box))
		if err != nil {
			return err
		}

		purchases, err := saga.New[Purchase, uuid.UUID](reg, "purchase_sagas", saga.WithTombstone(7*24*time.Hour))
		if err != nil {
			return err
		}

		type purchase = saga.Instance[Purchase, uuid.UUID]
		purchases.Start("OrderPlaced", saga.ByJSON(func(p Placed) uuid.UUID { return p.OrderID }),
			saga.JSON(func(_ context.Context, in *purchase, p Placed) error {
				in.State.Amount = p.Amount
				in.Emit(event.New(event.Aggregate{Type: "payment", ID: in.ID().String()}, "PaymentWanted", event.Bytes("", []byte(`{}`))))
				if err := in.Compensation(event.New(event.Aggregate{Type: "stock", ID: in.ID().String()}, "GoodsReleased", event.Bytes("", []byte(`{}`)))); err != nil {
					return err
				}

				return in.Timeout("unpaid", 15*time.Minute, event.Payload{})
			}))

		purchases.Handle("PaymentTaken", saga.ByHeader[uuid.UUID](), func(_ context.Context, in *purchase, _ *consumer.Message) error {
			in.State.Paid = true
			in.Complete() // this cancels the timeout
			return nil
		})

		purchases.Timeout("unpaid", func(_ context.Context, in *purchase, _ *consumer.Message) error {
			in.Complete()
			_, err := in.Compensate()
			return err
		})

		if err := reg.Prepare(ctx); err != nil {
			return err
		}

		return purchases.Register(c)
	}

	_ = register
}
