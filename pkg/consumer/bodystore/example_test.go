package bodystore_test

import (
	"context"
	"log"

	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/pkg/codec"
	"github.com/outrelay/outrelay/pkg/consumer"
	"github.com/outrelay/outrelay/pkg/consumer/bodystore"
	"github.com/outrelay/outrelay/pkg/event"
	"github.com/outrelay/outrelay/pkg/outbox"
)

var documentScanned = event.Type[[]byte]{Aggregate: "document", Name: "DocumentScanned", Codec: codec.Raw("application/pdf")}

// Payloads of more than 64 KiB go to GridFS, and the handler gets them whole. The program examples/claimcheck does this with
// real servers.
func Example() {
	var (
		ctx context.Context
		db  *mongo.Database
		c   *consumer.Consumer
	)
	store, err := bodystore.NewGridFS(db)
	if err != nil {
		log.Fatal(err)
	}

	box, err := outbox.New(db, outbox.WithMiddleware(bodystore.Produce(store, 64<<10)))
	if err != nil {
		log.Fatal(err)
	}
	err = box.Transaction(ctx, func(ctx context.Context) error {
		return box.Append(ctx, documentScanned.New("d-1", make([]byte, 5<<20)))
	})
	if err != nil {
		log.Fatal(err)
	}

	err = c.Handle("archive", consumer.For(documentScanned, func(_ context.Context, m *consumer.Message, body []byte) error {
		log.Printf("document %s has %d bytes", m.Aggregate.ID, len(body))
		return nil
	}), consumer.WithMiddleware(bodystore.Consume(store)))
	if err != nil {
		log.Fatal(err)
	}

	// One process removes the bodies that are older than 30 days.
	if err := store.Run(ctx); err != nil {
		log.Fatal(err)
	}
}
