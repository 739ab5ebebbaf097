// Package shop contains the common parts of the three programs of the example: connections, events
// and payloads.
package shop

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
	"golang.org/x/sync/errgroup"

	"github.com/outrelay/outrelay/pkg/consumer"
	"github.com/outrelay/outrelay/pkg/event"
	"github.com/outrelay/outrelay/pkg/outbox"
)

// Types of events.
var (
	OrderPlaced    = event.Type[Order]{Aggregate: "order", Name: "OrderPlaced"}
	OrderPaid      = event.Type[Order]{Aggregate: "order", Name: "OrderPaid"}
	OrderCancelled = event.Type[Order]{Aggregate: "order", Name: "OrderCancelled"}

	ChargeCard      = event.Type[Charge]{Aggregate: "payment", Name: "ChargeCard"}      // a command for the bank
	CardCharged     = event.Type[Charge]{Aggregate: "payment", Name: "CardCharged"}     // an answer of the bank
	CardRejected    = event.Type[Charge]{Aggregate: "payment", Name: "CardRejected"}    // an answer of the bank
	PaymentTaken    = event.Type[Charge]{Aggregate: "payment", Name: "PaymentTaken"}    // a result of the payment
	PaymentRejected = event.Type[Charge]{Aggregate: "payment", Name: "PaymentRejected"} // a result of the payment
)

// Order is an order in the collection of the order service, and in the payloads of its events.
type Order struct {
	ID       string `bson:"_id" json:"id"`
	Customer string `bson:"customer" json:"customer"`
	Cents    int64  `bson:"cents" json:"cents"`
	Status   string `bson:"status" json:"status"` // placed, paid or cancelled
}

// Charge is the payload of events about the payment of an order.
type Charge struct {
	Order string `json:"order"`
	Cents int64  `json:"cents"`
}

// Shop contains the connections of one program to the servers.
type Shop struct {
	Client  *mongo.Client
	DB      *mongo.Database
	Outbox  *outbox.Box
	brokers []string
	topics  string
}

// Main connects to the servers, runs the parts of a program until a signal arrives or one of them
// fails, and ends the process. It uses these environment variables:
//
//	MONGODB_URI     URI of MongoDB              mongodb://127.0.0.1:27017/?directConnection=true
//	KAFKA_BROKERS   addresses of Kafka          127.0.0.1:9094
//	SHOP_DATABASE   name of the database        shop
//	SHOP_TOPICS     prefix of the topics        outbox.event.
func Main(build func(ctx context.Context, s *Shop) (parts []func(context.Context) error, err error)) {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()

	if err := runParts(ctx, build); err != nil && !errors.Is(err, context.Canceled) {
		fmt.Fprintln(os.Stderr, "the program fails:", err)
		os.Exit(1)
	}
}

// runParts connects, builds the parts and runs them until ctx ends or one of them fails.
func runParts(ctx context.Context, build func(context.Context, *Shop) ([]func(context.Context) error, error)) error {
	uri := cmp.Or(os.Getenv("MONGODB_URI"), "mongodb://127.0.0.1:27017/?directConnection=true")
	client, err := mongo.Connect(options.Client().ApplyURI(uri))
	if err != nil {
		return fmt.Errorf("MONGODB_URI: %w", err)
	}
	defer func() { _ = client.Disconnect(context.WithoutCancel(ctx)) }()

	s := &Shop{
		Client:  client,
		DB:      client.Database(cmp.Or(os.Getenv("SHOP_DATABASE"), "shop")),
		brokers: strings.Split(cmp.Or(os.Getenv("KAFKA_BROKERS"), "127.0.0.1:9094"), ","),
		topics:  cmp.Or(os.Getenv("SHOP_TOPICS"), "outbox.event."),
	}
	if s.Outbox, err = outbox.New(s.DB); err != nil {
		return err
	}

	parts, err := build(ctx, s)
	if err != nil {
		return err
	}

	g, ctx := errgroup.WithContext(ctx)
	for _, part := range parts {
		g.Go(func() error { return part(ctx) })
	}

	return g.Wait()
}

// Consumer returns a member of the group that reads the events of these aggregates. Each message
// has its effect once for each handler: the inbox is in the database of the shop and marks messages
// in the transaction of the handler.
func (s *Shop) Consumer(group string, aggregates ...string) (*consumer.Consumer, error) {
	topics := make([]string, len(aggregates))
	for i, a := range aggregates {
		topics[i] = s.topics + a
	}

	return consumer.New(s.DB.Name()+"."+group, s.DB, consumer.WithTopics(topics...),
		// If a process is killed, others wait for this time before they can claim its messages.
		consumer.WithLease(5*time.Second),
		consumer.WithDrain(4*time.Second),
		// The topics also contain events for other consumers. Without this, they would become dead letters.
		consumer.WithSkip("*"),
		consumer.WithBrokers(s.brokers...),
		// The group waits for this time for a member that was killed.
		consumer.WithSessionTimeout(6*time.Second))
}
