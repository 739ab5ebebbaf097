// Package shop is what the three programs of the example have in common: where the servers are, and what the events say.
package shop

import (
	"cmp"
	"context"
	"encoding/json"
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
	"github.com/outrelay/outrelay/pkg/inbox"
	"github.com/outrelay/outrelay/pkg/outbox"
)

// The events. Their payloads are JSON.
const (
	OrderPlaced    = "OrderPlaced"    // Order
	OrderPaid      = "OrderPaid"      // Order
	OrderCancelled = "OrderCancelled" // Order
	ChargeCard     = "ChargeCard"     // Charge: a command to whoever talks to the bank
	CardCharged    = "CardCharged"    // Charge: its answers
	CardRefused    = "CardRefused"    // Charge
	PaymentTaken   = "PaymentTaken"   // Charge: how the payment ended
	PaymentRefused = "PaymentRefused" // Charge
)

// Order is an order as its service keeps it and as its events tell of it.
type Order struct {
	ID       string `bson:"_id" json:"id"`
	Customer string `bson:"customer" json:"customer"`
	Cents    int64  `bson:"cents" json:"cents"`
	Status   string `bson:"status" json:"status"` // placed, paid, cancelled
}

// Charge is what the payment of an order is about.
type Charge struct {
	Order string `json:"order"`
	Cents int64  `json:"cents"`
}

// Event is an event of an aggregate with a payload as JSON.
func Event(aggregate, id, typ string, payload any) (event.Event, error) {
	data, err := json.Marshal(payload)
	if err != nil {
		return event.Event{}, fmt.Errorf("encoding %s: %w", typ, err)
	}
	return event.New(aggregate, id, typ, data, event.WithContentType("application/json")), nil
}

// Shop is one program's connection to the servers.
type Shop struct {
	Client  *mongo.Client
	DB      *mongo.Database
	Outbox  *outbox.Box
	brokers []string
	topics  string
}

// Main connects, runs the parts of a program until it is told to stop or one of them fails, and ends the process.
//
//	MONGODB_URI     where MongoDB is            mongodb://127.0.0.1:27017/?directConnection=true
//	KAFKA_BROKERS   where Kafka is              127.0.0.1:9094
//	SHOP_DATABASE   the database                shop
//	SHOP_TOPICS     what topics begin with      outbox.event.
func Main(build func(ctx context.Context, s *Shop) (parts []func(context.Context) error, err error)) {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, build); err != nil && !errors.Is(err, context.Canceled) {
		fmt.Fprintln(os.Stderr, "the program ends:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, build func(context.Context, *Shop) ([]func(context.Context) error, error)) error {
	uri := cmp.Or(os.Getenv("MONGODB_URI"), "mongodb://127.0.0.1:27017/?directConnection=true")
	client, err := mongo.Connect(options.Client().ApplyURI(uri))
	if err != nil {
		return fmt.Errorf("MONGODB_URI: %w", err)
	}
	defer func() { _ = client.Disconnect(context.WithoutCancel(ctx)) }()
	s := &Shop{
		Client: client, DB: client.Database(cmp.Or(os.Getenv("SHOP_DATABASE"), "shop")),
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

// Consumer is a member of a group that reads the events of those aggregates. Each message has its effect once for each
// handler: the inbox is in the shop's database, and marks what was handled in the handler's own transaction.
func (s *Shop) Consumer(group string, aggregates ...string) (*consumer.Consumer, error) {
	in, err := inbox.New(s.DB, inbox.WithLease(5*time.Second)) // how long others wait for a message that a killed process had claimed
	if err != nil {
		return nil, err
	}
	topics := make([]string, len(aggregates))
	for i, a := range aggregates {
		topics[i] = s.topics + a
	}
	return consumer.New(s.DB.Name()+"."+group, s.DB, consumer.Topics(topics...),
		consumer.WithInbox(in),
		consumer.AckUnknown(),         // the topics carry events for others too
		consumer.Drain(5*time.Second), // below the group's RebalanceTimeout
		consumer.WithKafka(consumer.KafkaConfig{
			Brokers:           s.brokers,
			SessionTimeout:    6 * time.Second, // how long the group waits for a member that was killed
			RebalanceTimeout:  10 * time.Second,
			HeartbeatInterval: 500 * time.Millisecond, // by which a member learns that another came or went
			WatchPartitions:   time.Second,            // the relay creates the topics with the first event
		}))
}
