// Schemaregistry encodes events with an Avro schema of a schema registry, in Confluent's wire format, so that consumers in any
// language can read them. The consumer in this program reads them with the same declaration.
//
//	go run ./cmd/outrelay dev --keep   # prints the addresses of its servers
//	MONGODB_URI=… KAFKA_BROKERS=… SCHEMA_REGISTRY=http://127.0.0.1:8081 go run ./examples/schemaregistry
package main

import (
	"cmp"
	"context"
	"log"
	"os"

	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/examples/local"
	"github.com/outrelay/outrelay/pkg/codec/registry"
	"github.com/outrelay/outrelay/pkg/consumer"
	"github.com/outrelay/outrelay/pkg/event"
	"github.com/outrelay/outrelay/pkg/outbox"
)

// Order is the payload of OrderPlaced. The tags name the fields of the schema.
type Order struct {
	Cents    int64  `avro:"cents"`
	Currency string `avro:"currency"`
}

const orderSchema = `{
	"type": "record", "name": "Order",
	"fields": [{"name": "cents", "type": "long"}, {"name": "currency", "type": "string", "default": "EUR"}]
}`

func main() {
	local.Main(func(ctx context.Context, db *mongo.Database) error {
		orderPlaced, err := declare(ctx, cmp.Or(os.Getenv("SCHEMA_REGISTRY"), "http://127.0.0.1:8081"))
		if err != nil {
			return err
		}
		if err := place(ctx, db, orderPlaced, "o-1", Order{Cents: 4200, Currency: "CHF"}); err != nil {
			return err
		}

		c, err := consumer.New("billing", db, consumer.WithBrokers(local.Brokers()...), consumer.WithTopics("outbox.event.order"))
		if err != nil {
			return err
		}
		err = c.Handle("invoice", consumer.For(orderPlaced, func(_ context.Context, m *consumer.Message, o Order) error {
			log.Printf("order %s: %d %s", m.Aggregate.ID, o.Cents, o.Currency)
			return nil
		}))
		if err != nil {
			return err
		}
		return c.Run(ctx)
	})
}

// declare returns the type of the event with the codec of its schema, which it registers if necessary.
func declare(ctx context.Context, address string) (event.Type[Order], error) {
	schemas, err := registry.New(address, registry.WithRegister())
	if err != nil {
		return event.Type[Order]{}, err
	}
	avro, err := schemas.Avro(ctx, registry.Schema{Subject: "outbox.event.order-value", Definition: orderSchema})
	return event.Type[Order]{Aggregate: "order", Name: "OrderPlaced", Codec: avro}, err
}

// place appends the event of an order.
func place(ctx context.Context, db *mongo.Database, orderPlaced event.Type[Order], id string, order Order) error {
	box, err := outbox.New(db)
	if err != nil {
		return err
	}
	return box.Transaction(ctx, func(ctx context.Context) error {
		return box.Append(ctx, orderPlaced.New(id, order))
	})
}
