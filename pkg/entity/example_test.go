package entity_test

import (
	"context"
	"errors"
	"fmt"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/base/module"
	"github.com/outrelay/outrelay/internal/lab/memory"
	"github.com/outrelay/outrelay/pkg/consumer"
	"github.com/outrelay/outrelay/pkg/entity"
	"github.com/outrelay/outrelay/pkg/outbox"
)

// Customer is the entity in the examples.
type Customer struct {
	ID      string `bson:"_id"`
	Name    string `bson:"name"`
	Version int64  `bson:"-"`
}

// customerID returns the place of the id.
func customerID(c *Customer) *string { return &c.ID }

// A service passes its own collection instead of nil and the option that keeps the example in memory. Each call needs a
// transaction, for example that of a message.
func ExampleNew() {
	db := memory.NewDB()
	customers, err := entity.New(nil, customerID, memory.NewEntities(db, "customers"),
		entity.WithVersion(func(c *Customer) *int64 { return &c.Version }))
	if err != nil {
		fmt.Println(err)
		return
	}

	err = db.Transaction(context.Background(), func(ctx context.Context) error {
		if _, err := customers.Insert(ctx, Customer{ID: "c-1", Name: "Ada"}); err != nil {
			return err
		}
		c, err := customers.Load(ctx, "c-1")
		fmt.Println(c.Name, c.Version)
		return err
	})
	fmt.Println(err)
	// Output:
	// Ada 1
	// <nil>
}

// Either a customer is changed and all consumers of the topic receive the change, or neither happens. A service passes its own
// collection instead of nil and the option that keeps the example in memory.
func ExampleNewRecorded() {
	db := memory.NewDB()
	box, err := memory.NewOutbox(db)
	if err != nil {
		fmt.Println(err)
		return
	}
	customers, err := entity.NewRecorded(nil, box, "customer", customerID, memory.NewEntities(db, "customers"))
	if err != nil {
		fmt.Println(err)
		return
	}

	err = box.Transaction(context.Background(), func(ctx context.Context) error {
		if _, err := customers.Insert(ctx, Customer{ID: "c-1", Name: "Ada"}); err != nil {
			return err
		}
		_, err := customers.Delete(ctx, "c-1")
		return err
	})
	fmt.Println(err)
	printEvents(box)
	// Output:
	// <nil>
	// customer.upserted {"_id":"c-1","name":"Ada","version":1}
	// customer.deleted {"_id":"c-1","version":2}
}

// printEvents prints the events in the outbox.
func printEvents(box *outbox.Box) {
	envelopes, err := box.Parts(module.Key{}).Store.Stored(context.Background())
	if err != nil {
		fmt.Println(err)
		return
	}

	for _, e := range envelopes {
		payload, err := bson.MarshalExtJSON(e.Lookup("payload").Document(), false, false)
		if err != nil {
			fmt.Println(err)
			return
		}
		fmt.Printf("%s %s\n", e.Lookup("type").StringValue(), payload)
	}
}

// Another service copies the customers to its own database. It passes its own collection instead of nil and the option that keeps
// the example in memory.
func ExampleNewProjector() {
	customers, err := entity.NewProjector[Customer, string](nil, "customer", memory.NewEntities(memory.NewDB(), "customers"))
	if err != nil {
		fmt.Println(err)
		return
	}
	handler := consumer.Batch(0, customers.HandleBatch, "customer.*") // for consumer.Handle
	_ = handler

	// A message that is no change of a customer is rejected, and becomes a dead letter.
	err = customers.Handle(context.Background(), &consumer.Message{ID: "m-1", Name: "customer.upserted", Value: []byte("{}")})
	fmt.Println(errors.Is(err, entity.ErrUnknownChange))
	// Output: true
}

// A handler that is skipped if the customer is missing: the message is rolled back, counted and gone.
func ExampleCollection_Load() {
	confirm := func(customers *entity.Collection[Customer, string]) consumer.HandlerFunc {
		return func(ctx context.Context, m *consumer.Message) error {
			c, err := customers.Load(ctx, m.Aggregate.ID)
			if errors.Is(err, entity.ErrMissing) {
				return consumer.Discard(err)
			}
			if err != nil {
				return err
			}

			c.Name += " (confirmed)"
			_, err = customers.Update(ctx, c)
			return err
		}
	}
	_ = confirm
}
