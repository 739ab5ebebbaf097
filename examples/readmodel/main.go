// Readmodel keeps the revenue of each day, from the events of another service. A redelivered event does not count twice, because
// the change of the total and the mark of the message are one transaction.
//
//	go run ./cmd/outrelay dev --keep   # prints the addresses of its servers
//	MONGODB_URI=… KAFKA_BROKERS=… go run ./examples/readmodel
package main

import (
	"context"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/examples/local"
	"github.com/outrelay/outrelay/pkg/consumer"
	"github.com/outrelay/outrelay/pkg/event"
)

// Order is the payload of OrderPlaced.
type Order struct {
	Cents int64 `json:"cents"`
}

// OrderPlaced reports a new order.
var OrderPlaced = event.Type[Order]{Aggregate: "order", Name: "OrderPlaced"}

func main() {
	local.Main(func(ctx context.Context, db *mongo.Database) error {
		c, err := consumer.New("revenue", db, consumer.WithBrokers(local.Brokers()...), consumer.WithTopics("outbox.event.order"))
		if err != nil {
			return err
		}
		if err := register(c, db); err != nil {
			return err
		}
		return c.Run(ctx)
	})
}

// register adds the handler of the view to c.
func register(c *consumer.Consumer, db *mongo.Database) error {
	days := db.Collection("revenue")
	return c.Handle("daily-revenue", consumer.For(OrderPlaced, func(ctx context.Context, m *consumer.Message, o Order) error {
		day := m.Time.UTC().Format(time.DateOnly)
		add := bson.D{{Key: "$inc", Value: bson.D{{Key: "orders", Value: 1}, {Key: "cents", Value: o.Cents}}}}
		_, err := days.UpdateByID(ctx, day, add, options.UpdateOne().SetUpsert(true))
		return err
	}))
}
