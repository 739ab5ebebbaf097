package outbox_test

import (
	"context"
	"log"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/pkg/event"
	"github.com/outrelay/outrelay/pkg/outbox"
)

// A collection that rejects writes outside of a transaction.
func ExampleCollection() {
	var (
		ctx    context.Context
		client *mongo.Client
		box    *outbox.Box
	)
	stock, err := outbox.NewCollection(client.Database("shop").Collection("stock"))
	if err != nil {
		log.Fatal(err)
	}

	err = outbox.Transaction(ctx, client, func(ctx context.Context) error {
		res, err := stock.UpdateOne(ctx,
			bson.D{{Key: "_id", Value: "lamp"}, {Key: "left", Value: bson.D{{Key: "$gt", Value: 0}}}},
			bson.D{{Key: "$inc", Value: bson.D{{Key: "left", Value: -1}}}})
		if err != nil || res.MatchedCount == 0 {
			return err
		}

		return box.Append(ctx, event.New(event.Aggregate{Type: "stock", ID: "lamp"}, "LampTaken", event.Payload{}))
	})
	if err != nil {
		log.Fatal(err)
	}
}

// In tests and on development machines, a write outside of its transaction is found at once.
func ExampleStrayMonitor() {
	client, err := mongo.Connect(options.Client().
		ApplyURI("mongodb://localhost:27017").
		SetMonitor(outbox.StrayMonitor(func(_ context.Context, s outbox.Stray) {
			log.Printf("%s on %s.%s is outside of the transaction", s.Command, s.Database, s.Collection)
		}, nil)))
	if err != nil {
		log.Fatal(err)
	}
	defer func() { _ = client.Disconnect(context.Background()) }()
}
