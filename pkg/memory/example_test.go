package memory_test

import (
	"context"
	"fmt"
	"log"
	"time"

	"github.com/outrelay/outrelay/pkg/consumer"
	"github.com/outrelay/outrelay/pkg/event"
	"github.com/outrelay/outrelay/pkg/memory"
	"github.com/outrelay/outrelay/pkg/outbox"
)

// Orders is a service whose dependencies are behind interfaces. In production, outbox.Box.Transaction
// and *outbox.Box implement them.
type Orders struct {
	Transaction func(ctx context.Context, fn func(ctx context.Context) error) error
	Outbox      interface {
		Append(ctx context.Context, events ...event.Event) error
	}
	Store interface {
		Insert(ctx context.Context, id string, total int) error
	}
}

func (s *Orders) Place(ctx context.Context, id string, total int) error {
	return s.Transaction(ctx, func(ctx context.Context) error {
		if err := s.Store.Insert(ctx, id, total); err != nil {
			return err
		}
		return s.Outbox.Append(ctx, event.New(event.Aggregate{Type: "order", ID: id}, "OrderPlaced", event.Bytes("", fmt.Appendf(nil, "%d", total))))
	})
}

// A unit test of a service: committed events are in the topic, and events that were rolled back are
// not.
func Example() {
	ctx := context.Background()
	db, broker := memory.NewDB(), memory.NewBroker()
	box, err := memory.NewOutbox(db)
	if err != nil {
		log.Fatal(err)
	}

	relay, err := memory.NewRelay(box, broker)
	if err != nil {
		log.Fatal(err)
	}

	orders := Orders{Transaction: db.Transaction, Outbox: box, Store: memory.NewTable[string, int](db, "orders")}

	fmt.Println(orders.Place(ctx, "o-1", 42))
	fmt.Println(orders.Place(ctx, "o-1", 42) != nil) // the id is taken: no second event
	if err := relay.Flush(ctx); err != nil {
		log.Fatal(err)
	}

	for _, r := range broker.Records("outbox.event.order") {
		fmt.Printf("%s: %s\n", r.Key, r.Value)
	}
	// Output:
	// <nil>
	// true
	// o-1: 42
}

// The handlers of a consumer, with an inbox in the same transactions.
func ExampleBroker() {
	ctx, stop := context.WithTimeout(context.Background(), time.Minute)
	defer stop()
	db, broker := memory.NewDB(), memory.NewBroker()
	inbox, err := memory.NewInbox(db)
	if err != nil {
		log.Fatal(err)
	}

	c, err := consumer.New("shipping", nil, consumer.WithTopics("orders"),
		consumer.WithTransport(broker), consumer.WithInbox(inbox), consumer.Transactions(db.Transaction),
		consumer.Letters(memory.NewLetters(db)), consumer.Commits(consumer.CommitEach()))
	if err != nil {
		log.Fatal(err)
	}

	parcels := memory.NewTable[string, int](db, "parcels")
	err = c.Handle("OrderPlaced", consumer.Func(func(ctx context.Context, m *consumer.Message) error {
		n, _ := parcels.Get(ctx, string(m.Key))
		return parcels.Put(ctx, string(m.Key), n+1)
	}, "OrderPlaced"))
	if err != nil {
		log.Fatal(err)
	}

	run, leave := context.WithCancel(ctx)
	done := make(chan error, 1)
	go func() { done <- c.Run(run) }()

	placed := &consumer.Message{Key: []byte("o-1"), Headers: []event.Header{{Key: "id", Value: []byte("1")}, {Key: "type", Value: []byte("OrderPlaced")}}}
	if err := broker.Publish(ctx, "orders", []*consumer.Message{placed, placed}); err != nil { // twice, with one id
		log.Fatal(err)
	}
	if err := broker.AwaitCommitted(ctx, "shipping", "orders"); err != nil {
		log.Fatal(err)
	}

	leave()
	n, err := parcels.Get(ctx, "o-1")
	fmt.Println(n, err, <-done)
	// Output: 1 <nil> <nil>
}

// A reminder that is due in a day, without waiting for a day.
func ExampleManualClock() {
	ctx := context.Background()
	clock := memory.NewManualClock(time.Date(2026, 11, 1, 12, 0, 0, 0, time.UTC))
	db, broker := memory.NewDB(memory.WithClock(clock)), memory.NewBroker(memory.WithClock(clock))
	box, err := memory.NewOutbox(db)
	if err != nil {
		log.Fatal(err)
	}

	relay, err := memory.NewRelay(box, broker)
	if err != nil {
		log.Fatal(err)
	}
	if err := db.Transaction(ctx, func(ctx context.Context) error {
		_, err := box.Schedule(ctx, clock.Now().Add(24*time.Hour), event.New(event.Aggregate{Type: "order", ID: "o-1"}, "PaymentDue", event.Payload{}))
		return err
	}); err != nil {
		log.Fatal(err)
	}

	for range 2 {
		scheduled := 0
		for _, err := range box.Scheduled(ctx, outbox.ScheduledQuery{}) {
			if err != nil {
				log.Fatal(err)
			}
			scheduled++
		}

		fmt.Println(scheduled, "scheduled,", len(broker.Records("outbox.event.order")), "delivered")
		clock.Advance(24 * time.Hour)
		if err := relay.Flush(ctx); err != nil {
			log.Fatal(err)
		}
	}
	// Output:
	// 1 scheduled, 0 delivered
	// 0 scheduled, 1 delivered
}
