package guard_test

import (
	"context"
	"errors"
	"fmt"
	"log"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/pkg/event"
	"github.com/outrelay/outrelay/pkg/outbox"
	"github.com/outrelay/outrelay/pkg/outbox/guard"
)

// A collection that rejects writes outside of a transaction.
func ExampleCollection() {
	var (
		ctx    context.Context
		client *mongo.Client
		box    *outbox.Box
	)
	stock := guard.NewCollection(client.Database("shop").Collection("stock"))
	err := box.Transaction(ctx, func(ctx context.Context) error {
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
func ExampleMonitor() {
	client, err := mongo.Connect(options.Client().
		ApplyURI("mongodb://localhost:27017").
		SetMonitor(guard.Monitor(func(_ context.Context, s guard.Stray) {
			log.Printf("%s on %s.%s is outside of the transaction", s.Command, s.Database, s.Collection)
		}, nil)))
	if err != nil {
		log.Fatal(err)
	}
	defer func() { _ = client.Disconnect(context.Background()) }()
}

// A write without a transaction is rejected before it is sent.
func ExampleCollection_InsertOne() {
	ctx := context.Background()
	client, err := mongo.Connect(options.Client().ApplyURI("mongodb://localhost:27017"))
	if err != nil {
		log.Fatal(err)
	}
	defer func() { _ = client.Disconnect(ctx) }()

	stock := guard.NewCollection(client.Database("shop").Collection("stock"))
	_, err = stock.InsertOne(ctx, bson.D{{Key: "_id", Value: "lamp"}})
	fmt.Println(errors.Is(err, outbox.ErrNoTransaction))
	fmt.Println(err)
	// Output:
	// true
	// collection stock: no running transaction in this context: use the context that the transaction's callback gets
}
