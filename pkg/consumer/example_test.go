package consumer_test

import (
	"context"
	"encoding/json"
	"errors"
	"log"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/pkg/consumer"
	"github.com/outrelay/outrelay/pkg/event"
	"github.com/outrelay/outrelay/pkg/outbox"
)

// A shipping service. For each placed order it creates one parcel and appends one event, exactly once, however often
// the record arrives and in however many processes this runs.
func ExampleConsumer() {
	var (
		ctx context.Context
		db  *mongo.Database
		box *outbox.Box
	)
	c, err := consumer.New("shipping", db, consumer.WithBrokers("kafka-1:9092"), consumer.WithTopics("outbox.event.order"))
	if err != nil {
		log.Fatal(err)
	}

	err = c.Handle("OrderPlaced", consumer.Func(func(ctx context.Context, m *consumer.Message) error {
		var order struct{ ID string }
		if err := json.Unmarshal(m.Value, &order); err != nil {
			// The consumer tries again, and then writes a dead letter.
			return err
		}
		if _, err := db.Collection("parcels").InsertOne(ctx, bson.D{{Key: "order", Value: order.ID}}); err != nil {
			return err
		}
		return box.Append(ctx, event.New(event.Aggregate{Type: "parcel", ID: order.ID}, "ParcelPacked", event.Bytes("", m.Value)))
	}, "OrderPlaced"))
	if err != nil {
		log.Fatal(err)
	}
	if err := c.Run(ctx); err != nil {
		log.Fatal(err)
	}
}

// A service that has removed a handler also removes the messages that wait for it, for example in a migration.
func ExampleConsumer_Retire() {
	var (
		ctx context.Context
		db  *mongo.Database
	)
	// The options are those of the members.
	c, err := consumer.New("shipping", db, consumer.WithBrokers("kafka:9092"), consumer.WithTopics("outbox.event.order"))
	if err != nil {
		log.Fatal(err)
	}
	err = c.Retire(ctx, "pack-parcels")
	if errors.Is(err, consumer.ErrRunning) {
		log.Fatal("stop the members of the group: ", err)
	}
	if err != nil {
		log.Fatal(err)
	}
}

// An article that does not exist is not found by another attempt. A service that is away is tried for two days.
func ExampleWithRetry() {
	var c *consumer.Consumer
	errNoSuchArticle := errors.New("no such article")
	err := c.Handle("reserve-stock", consumer.Func(func(context.Context, *consumer.Message) error {
		return errNoSuchArticle
	}, "OrderPlaced"),
		consumer.WithRetry(consumer.Retry{Max: time.Minute, GiveUpAfter: 48 * time.Hour}),
		consumer.WithRetryFor(consumer.ErrorIs(errNoSuchArticle), consumer.NoRetry()))
	if err != nil {
		log.Fatal(err)
	}
}

// Failed messages wait in three topics instead of MongoDB, and later messages of their keys go on.
func ExampleWithRetryTopics() {
	var c *consumer.Consumer
	err := c.Handle("send-mails", consumer.Func(func(context.Context, *consumer.Message) error {
		return errors.New("the mail server is away")
	}, "order.*"), consumer.WithRetryTopics(10*time.Second, time.Minute, time.Hour))
	if err != nil {
		log.Fatal(err)
	}
}
