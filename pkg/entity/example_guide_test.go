package entity_test

import (
	"context"
	"log"
	"time"

	"github.com/outrelay/outrelay/pkg/entity"
	"github.com/outrelay/outrelay/pkg/event"
	"github.com/outrelay/outrelay/pkg/outbox"
)

// Order is the entity in docs/services.md.
type Order struct {
	ID       string   `json:"id" bson:"_id"`
	State    string   `json:"state" bson:"state"`
	Reminder event.ID `json:"-" bson:"reminder"`
}

// PaymentDue is the scheduled event in docs/services.md.
var PaymentDue = event.Type[Order]{Aggregate: "order", Name: "PaymentDue"}

// The lines of docs/services.md: an order has the id of its reminder, which the payment cancels.
func ExampleCollection_Insert() {
	var (
		ctx    context.Context
		box    *outbox.Box
		orders *entity.Collection[Order, string]
		order  Order
	)
	err := box.Transaction(ctx, func(ctx context.Context) (err error) {
		order.Reminder, err = box.ScheduleIn(ctx, 24*time.Hour, PaymentDue.New(order.ID, order))
		if err != nil {
			return err
		}
		_, err = orders.Insert(ctx, order)
		return err
	})
	if err != nil {
		log.Fatal(err)
	}

	err = box.Transaction(ctx, func(ctx context.Context) error {
		paid, err := orders.Load(ctx, order.ID)
		if err != nil {
			return err
		}
		paid.State = "paid"
		if _, err := orders.Update(ctx, paid); err != nil {
			return err
		}
		return box.Cancel(ctx, paid.Reminder)
	})
	if err != nil {
		log.Fatal(err)
	}
}
