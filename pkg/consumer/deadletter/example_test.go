package deadletter_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"log/slog"
	"time"

	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/lab/memory"
	"github.com/outrelay/outrelay/internal/service/consuming"
	"github.com/outrelay/outrelay/internal/service/transport"
	"github.com/outrelay/outrelay/pkg/consumer"
	"github.com/outrelay/outrelay/pkg/consumer/deadletter"
	"github.com/outrelay/outrelay/pkg/event"
	"github.com/outrelay/outrelay/pkg/outbox"
)

// An operator looks at the letters, corrects one, and hands it back to its handler. In production, the Desk comes from
// deadletter.New. The surroundings of this example are in memory.
func ExampleDesk_Requeue() {
	ctx, stop := context.WithCancel(context.Background())
	db, broker := memory.NewDB(), memory.NewBroker(1)
	inbox, err := memory.NewInbox(db)
	if err != nil {
		log.Fatal(err)
	}
	around := consumer.WithSurroundings(consuming.Surroundings{Transport: broker, Inbox: inbox, Transact: db.Transaction})
	c, err := consumer.New("billing", nil, around, consumer.WithTopics("orders"), consumer.WithLogger(slog.New(slog.DiscardHandler)))
	if err != nil {
		log.Fatal(err)
	}

	handled := make(chan string)
	h := consumer.Func(func(_ context.Context, m *consumer.Message) error {
		if string(m.Value) == "1,5 EUR" {
			return consumer.Reject(errors.New("the amount has a comma"))
		}
		handled <- string(m.Value)
		return nil
	}, "OrderPlaced")
	if err := c.Handle("invoice", h); err != nil {
		log.Fatal(err)
	}

	ended := make(chan error)
	go func() { ended <- c.Run(ctx) }()
	placed := transport.Record{Value: []byte("1,5 EUR"), Headers: []event.Header{{Key: "type", Value: []byte("OrderPlaced")}}}
	if err := broker.Publish(ctx, "orders", []transport.Record{placed}); err != nil {
		log.Fatal(err)
	}
	if err := broker.AwaitCommitted(ctx, "billing", "orders"); err != nil {
		log.Fatal(err)
	}

	desk, err := memory.NewLetters(db)
	if err != nil {
		log.Fatal(err)
	}
	for l, err := range desk.List(ctx, deadletter.Query{Group: "billing"}) {
		if err != nil {
			log.Fatal(err)
		}
		fmt.Printf("%s, %s: %s\n", l.ID.Handler, l.Class, l.Reason)
	}
	n, err := desk.Requeue(ctx, deadletter.Query{Handler: "invoice"}, deadletter.RequeueOptions{
		Actor: "ann",
		Note:  "the shop sends commas",
		Edit: func(l *deadletter.Letter) error {
			l.Value = []byte("1.5 EUR")
			return nil
		},
	})
	fmt.Println("requeued:", n, err)
	fmt.Println("handled:", <-handled)

	stop()
	if err := <-ended; err != nil {
		log.Fatal(err)
	}
	// Output:
	// invoice, rejected: the handler rejected the message: the amount has a comma
	// requeued: 1 <nil>
	// handled: 1.5 EUR
}

// A tool of the service discards old letters.
func ExampleNew() {
	var (
		ctx context.Context
		db  *mongo.Database
	)
	desk, err := deadletter.New(db)
	if err != nil {
		log.Fatal(err)
	}
	if _, err := desk.Discard(ctx, deadletter.Query{Before: time.Now().AddDate(0, -1, 0)}, deadletter.DiscardOptions{}); err != nil {
		log.Fatal(err)
	}
}

// Letters expire after a month, do not contain bodies, and are announced to other services.
func ExampleOption() {
	var db *mongo.Database
	box, err := outbox.New(db)
	if err != nil {
		log.Fatal(err)
	}

	letters := consumer.WithDeadLetters(
		deadletter.WithCollection("billing_dead"),
		deadletter.WithExpiry(30*24*time.Hour),
		deadletter.WithRedaction(func(_ context.Context, l *deadletter.Letter) error {
			l.Value = nil
			return nil
		}),
		deadletter.WithNotification(box),
		deadletter.WithTopic("billing.dead"))
	if _, err := consumer.New("billing", db, consumer.WithTopics("outbox.event.order"), letters); err != nil {
		log.Fatal(err)
	}
}
