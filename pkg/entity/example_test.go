package entity_test

import (
	"context"
	"errors"
	"fmt"

	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/memory"
	"github.com/outrelay/outrelay/pkg/consumer"
	"github.com/outrelay/outrelay/pkg/entity"
	"github.com/outrelay/outrelay/pkg/event"
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

// A service passes its own collection. Each call needs a transaction, for example that of a message.
func ExampleNew() {
	open := func(db *mongo.Database) (*entity.Collection[Customer, string], error) {
		return entity.New(db.Collection("customers"), customerID,
			entity.Versioned(func(c *Customer) *int64 { return &c.Version }))
	}
	_ = open
}

func ExampleNewOn() {
	db := memory.NewDB()
	customers, err := entity.NewOn(memory.NewDocuments(db, "customers", false), customerID)
	if err != nil {
		fmt.Println(err)
		return
	}

	err = db.Transaction(context.Background(), func(ctx context.Context) error {
		if _, err := customers.Insert(ctx, Customer{ID: "c-1", Name: "Ada"}); err != nil {
			return err
		}
		c, err := customers.Load(ctx, "c-1")
		fmt.Println(c.Name)
		return err
	})
	fmt.Println(err)
	// Output:
	// Ada
	// <nil>
}

// Either a customer is changed and all consumers of the topic receive the change, or neither happens.
func ExampleNewRecorded() {
	open := func(db *mongo.Database, box *outbox.Box) (*entity.Recorded[Customer, string], error) {
		return entity.NewRecorded(db.Collection("customers"), box, "customer", customerID)
	}
	_ = open
}

// printer prints the events that are appended. A service passes its outbox.
type printer struct{}

func (printer) Append(_ context.Context, events ...event.Event) error {
	for _, ev := range events {
		value, err := ev.Payload()
		if err != nil {
			return err
		}
		fmt.Printf("%s %s\n", ev.Name(), value)
	}
	return nil
}

func ExampleNewRecordedOn() {
	db := memory.NewDB()
	customers, err := entity.NewRecordedOn(memory.NewDocuments(db, "customers", false), memory.NewDocuments(db, "customers_deleted", false),
		printer{}, "customer", customerID)
	if err != nil {
		fmt.Println(err)
		return
	}

	err = db.Transaction(context.Background(), func(ctx context.Context) error {
		if _, err := customers.Insert(ctx, Customer{ID: "c-1", Name: "Ada"}); err != nil {
			return err
		}
		_, err := customers.Delete(ctx, "c-1")
		return err
	})
	fmt.Println(err)
	// Output:
	// customer.upserted {"_id":"c-1","name":"Ada","version":1}
	// customer.deleted {"_id":"c-1","version":2}
	// <nil>
}

// Another service copies the customers to its own database.
func ExampleNewProjector() {
	register := func(c *consumer.Consumer, db *mongo.Database) error {
		customers, err := entity.NewProjector[Customer, string](db.Collection("customers"), "customer")
		if err != nil {
			return err
		}
		return c.Handle("customers", consumer.Batch(customers.HandleBatch, "customer.*"))
	}
	_ = register
}

func ExampleNewProjectorOn() {
	customers, err := entity.NewProjectorOn[Customer, string](memory.NewView(memory.NewDB(), "customers"), "customer")
	if err != nil {
		fmt.Println(err)
		return
	}

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
