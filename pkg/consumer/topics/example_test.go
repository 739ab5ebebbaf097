package topics_test

import (
	"context"
	"log"

	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/pkg/consumer"
	"github.com/outrelay/outrelay/pkg/consumer/topics"
)

// Each tenant has a topic. A process that sets up a new tenant adds its topic to the running group.
func Example() {
	var (
		ctx context.Context
		db  *mongo.Database
	)
	list, err := topics.New(db, "billing")
	if err != nil {
		log.Fatal(err)
	}

	// Each member of the group:
	c, err := consumer.New("billing", db, consumer.WithBrokers("kafka-1:9092"), consumer.WithTopicList(list))
	if err != nil {
		log.Fatal(err)
	}
	go func() {
		if err := c.Run(ctx); err != nil {
			log.Print(err)
		}
	}()

	// Any process:
	if err := list.Add(ctx, "tenant.acme.orders"); err != nil {
		log.Fatal(err)
	}
}
