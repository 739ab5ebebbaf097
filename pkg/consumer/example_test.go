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

// A shipping service: for each placed order a parcel, and the event that tells of it, exactly once, however often the
// record comes and in however many processes this runs.
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
			return err // tried again, and then a dead letter
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

// A policy: what nobody can mend is a dead letter at once, a service that is away is asked again and again through retry
// topics, which hold nothing up, and the rest is tried three times in place.
func ExampleOn() {
	var errNoSuchArticle, errStockAway error
	policy := consumer.NewPolicy(
		consumer.On(consumer.Is(errNoSuchArticle)).Then(consumer.ToDeadLetter),
		consumer.On(consumer.Is(errStockAway)).RetryTopic(10*time.Second, time.Minute, time.Hour).Then(consumer.ToDeadLetter),
		consumer.On().Retry(3, 50*time.Millisecond, 250*time.Millisecond, time.Second).Then(consumer.ToDeadLetter),
	)
	var c *consumer.Consumer
	if err := c.Handle("order.*", consumer.Func(func(context.Context, *consumer.Message) error {
		return errors.New("no stock")
	}, "order.*"), consumer.OnFailure(policy)); err != nil {
		log.Fatal(err)
	}
}
