package entity_test

import (
	"context"
	"errors"
	"log"

	"github.com/google/uuid"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/pkg/consumer"
	"github.com/outrelay/outrelay/pkg/entity"
	"github.com/outrelay/outrelay/pkg/outbox"
)

type Customer struct {
	ID      uuid.UUID `bson:"_id"`
	Name    string    `bson:"name"`
	Version int64     `bson:"-"`
}

// Either a customer is changed and all consumers of the topic receive the change, or neither
// happens.
func ExampleRecorded() {
	var (
		ctx    context.Context
		client *mongo.Client
		id     uuid.UUID
	)
	db := client.Database("shop")
	box, err := outbox.New(db)
	if err != nil {
		log.Fatal(err)
	}

	customers, err := entity.NewRecorded(db.Collection("customers"), box, "customer",
		func(c *Customer) *uuid.UUID { return &c.ID },
		entity.Versioned(func(c *Customer) *int64 { return &c.Version }))
	if err != nil {
		log.Fatal(err)
	}

	err = box.Transaction(ctx, func(ctx context.Context) error {
		c, err := customers.Load(ctx, id)
		if err != nil {
			return err
		}

		c.Name = "Ada"
		_, err = customers.Update(ctx, c)
		return err
	})

	switch {
	case errors.Is(err, entity.ErrMissing):
		log.Print("no such customer")
	case errors.Is(err, entity.ErrStale):
		log.Print("somebody else was faster")
	case err != nil:
		log.Fatal(err)
	}
}

// Another service copies the customers to its own database.
func ExampleProjector() {
	var (
		ctx context.Context
		db  *mongo.Database
	)
	customers, err := entity.NewProjector[Customer, uuid.UUID](db.Collection("customers"), "customer")
	if err != nil {
		log.Fatal(err)
	}

	c, err := consumer.New("reports", db, consumer.WithTopics("outbox.event.customer"))
	if err != nil {
		log.Fatal(err)
	}
	if err := c.Handle("customer.*", consumer.Batch(customers.HandleBatch, "customer.*")); err != nil {
		log.Fatal(err)
	}
	if err := c.Run(ctx); err != nil {
		log.Fatal(err)
	}
}

// A handler that runs only for customers that exist.
func ExampleRequired() {
	var (
		c         *consumer.Consumer
		customers *entity.Collection[Customer, uuid.UUID]
	)
	h := entity.Required(customers,
		func(m *consumer.Message) (uuid.UUID, error) { return uuid.Parse(m.Aggregate.ID) },
		func(ctx context.Context, _ *consumer.Message, cu Customer) error {
			cu.Name += " (confirmed)"
			_, err := customers.Update(ctx, cu)
			return err
		})
	if err := c.Handle("CustomerConfirmed", consumer.Func(h, "CustomerConfirmed")); err != nil {
		log.Fatal(err)
	}
}
