package outbox_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/pkg/event"
	"github.com/outrelay/outrelay/pkg/outbox"
)

// An order and its event are committed together, or neither of them.
func ExampleBox_Transaction() {
	var (
		ctx    context.Context
		client *mongo.Client
	)
	db := client.Database("shop")
	box, err := outbox.New(db)
	if err != nil {
		log.Fatal(err)
	}

	err = box.Transaction(ctx, func(ctx context.Context) error {
		if _, err := db.Collection("orders").InsertOne(ctx, bson.D{{Key: "_id", Value: "o-1"}, {Key: "total", Value: 42}}); err != nil {
			return err
		}
		return box.Append(ctx, event.New(event.Aggregate{Type: "order", ID: "o-1"}, "OrderPlaced", event.JSON(map[string]int{"total": 42})))
	})
	if err != nil {
		log.Fatal(err)
	}
}

// A reminder that is due in a day, unless the payment arrives before.
func ExampleBox_Schedule() {
	var (
		ctx context.Context
		box *outbox.Box
		id  event.ID
	)
	err := box.Transaction(ctx, func(ctx context.Context) (err error) {
		id, err = box.Schedule(ctx, time.Now().Add(24*time.Hour), event.New(event.Aggregate{Type: "order", ID: "o-1"}, "PaymentDue", event.Payload{}))
		return err
	})
	if err != nil {
		log.Fatal(err)
	}

	if err := box.Cancel(ctx, id); errors.Is(err, outbox.ErrNotScheduled) {
		log.Print("too late: the reminder is on its way")
	}
}

// A context without a transaction is rejected before a command is sent.
func ExampleBox_Append() {
	ctx := context.Background()
	client, err := mongo.Connect(options.Client().ApplyURI("mongodb://localhost:27017"))
	if err != nil {
		log.Fatal(err)
	}

	defer func() { _ = client.Disconnect(ctx) }()
	box, err := outbox.New(client.Database("shop"))
	if err != nil {
		log.Fatal(err)
	}

	err = box.Append(ctx, event.New(event.Aggregate{Type: "order", ID: "o-1"}, "OrderPlaced", event.Payload{}))
	fmt.Println(errors.Is(err, outbox.ErrNoTransaction))
	fmt.Println(err)
	// Output:
	// true
	// appending to outbox: no running transaction in this context: use the context that the transaction's callback gets
}

// A middleware that adds a header to each event of the service.
func ExampleMiddleware() {
	tenant := func(next outbox.AppendFunc) outbox.AppendFunc {
		return func(ctx context.Context, ev event.Event) error {
			return next(ctx, ev.With(event.WithSource("/tenants/7")))
		}
	}

	ctx := context.Background()
	// In a service: outbox.New(db, outbox.WithMiddleware(tenant))
	box := newBox(outbox.WithMiddleware(tenant))
	err := box.Transaction(ctx, func(ctx context.Context) error {
		return box.Append(ctx, event.New(event.Aggregate{Type: "order", ID: "o-1"}, "OrderPlaced", event.Payload{}))
	})
	if err != nil {
		log.Fatal(err)
	}

	fmt.Println(listStored(box)[0].Lookup("source"))
	// Output: "/tenants/7"
}

// A middleware that checks the payload of an event by its name. The error of Append rolls the transaction back. Any library of
// schemas fits into such a function. In a list, it precedes middleware that encrypts the payload or stores it elsewhere.
func ExampleMiddleware_validation() {
	validators := map[string]func(payload []byte) error{
		"OrderPlaced": func(payload []byte) error {
			var order struct{ Customer string }
			if err := json.Unmarshal(payload, &order); err != nil || order.Customer == "" {
				return errors.New("the order has no customer")
			}
			return nil
		},
	}
	validate := func(next outbox.AppendFunc) outbox.AppendFunc {
		return func(ctx context.Context, ev event.Event) error {
			payload, err := ev.Payload()
			if check, ok := validators[ev.Name()]; ok && err == nil {
				err = check(payload)
			}
			if err != nil {
				return err
			}
			return next(ctx, ev)
		}
	}

	ctx := context.Background()
	// In a service: outbox.New(db, outbox.WithMiddleware(validate))
	box := newBox(outbox.WithMiddleware(validate))
	for _, order := range []map[string]string{{"customer": "ann"}, {}} {
		err := box.Transaction(ctx, func(ctx context.Context) error {
			return box.Append(ctx, event.New(event.Aggregate{Type: "order", ID: "o-1"}, "OrderPlaced", event.JSON(order), event.WithID("e-1")))
		})
		fmt.Println(len(listStored(box)), err)
	}
	// Output:
	// 1 <nil>
	// 1 appending to outbox: event e-1: the order has no customer
}

// The reminders that are due in the next week, the earliest first.
func ExampleBox_Scheduled() {
	ctx := context.Background()
	box := newBox() // in a service: outbox.New(db)
	monday := time.Date(2030, 1, 7, 9, 0, 0, 0, time.UTC)
	err := box.Transaction(ctx, func(ctx context.Context) error {
		for _, days := range []int{3, 1, 30} {
			order := event.New(event.Aggregate{Type: "order", ID: fmt.Sprintf("o-%d", days)}, "PaymentDue", event.Payload{})
			if _, err := box.Schedule(ctx, monday.AddDate(0, 0, days), order); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		log.Fatal(err)
	}

	week := outbox.ScheduledQuery{Name: "PaymentDue", From: monday, Before: monday.AddDate(0, 0, 7)}
	for e, err := range box.Scheduled(ctx, week) {
		if err != nil {
			log.Fatal(err)
		}
		fmt.Println(e.Aggregate.ID, e.DueAt.Weekday())
	}

	n, err := box.CancelScheduled(ctx, week)
	fmt.Println(n, err)
	// Output:
	// o-1 Tuesday
	// o-3 Thursday
	// 2 <nil>
}
