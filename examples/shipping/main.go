// The program shipping is the consumer of docs/consumers.md: it writes a parcel for each placed order.
package main

import (
	"context"
	"log"
	"net/http"
	"os"
	"os/signal"
	"syscall"
	"time"

	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/pkg/consumer"
	"github.com/outrelay/outrelay/pkg/event"
)

// Placed is the payload of OrderPlaced. A later version may add fields.
type Placed struct {
	Article string `json:"article"`
	Count   int    `json:"count"`
}

var OrderPlaced = event.Type[Placed]{Aggregate: "order", Name: "OrderPlaced"}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx); err != nil {
		log.Fatal(err)
	}
}

func run(ctx context.Context) error {
	client, err := mongo.Connect(options.Client().ApplyURI("mongodb://127.0.0.1:27017/?replicaSet=rs0"))
	if err != nil {
		return err
	}
	// ctx has ended by then.
	defer func() { _ = client.Disconnect(context.WithoutCancel(ctx)) }()

	db := client.Database("shipping")
	parcels := db.Collection("parcels")

	c, err := consumer.New("shipping", db,
		consumer.WithBrokers("127.0.0.1:9092"), consumer.WithTopics("outbox.event.order"))
	if err != nil {
		return err
	}

	// The writes of the handler with ctx commit together with the mark of the message.
	pack := func(ctx context.Context, m *consumer.Message, order Placed) error {
		_, err := parcels.InsertOne(ctx, map[string]any{"order": m.Aggregate.ID, "article": order.Article, "count": order.Count})
		return err
	}
	if err := c.Handle("pack-parcels", consumer.For(OrderPlaced, pack)); err != nil {
		return err
	}

	// The probes: /livez and /readyz.
	probes := &http.Server{Addr: ":8081", Handler: c.HealthHandler(), ReadHeaderTimeout: time.Second}
	go func() { log.Println("probes:", probes.ListenAndServe()) }()
	defer func() { _ = probes.Close() }()

	return c.Run(ctx)
}
