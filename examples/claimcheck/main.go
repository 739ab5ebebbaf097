// Claimcheck sends large documents: bodies above a size go to GridFS, and the event carries a reference with a checksum. The
// handler gets the whole body.
//
//	go run ./cmd/outrelay dev --keep   # prints the addresses of its servers
//	MONGODB_URI=… KAFKA_BROKERS=… go run ./examples/claimcheck scan.pdf
package main

import (
	"context"
	"errors"
	"fmt"
	"log"
	"os"

	"go.mongodb.org/mongo-driver/v2/mongo"
	"golang.org/x/sync/errgroup"

	"github.com/outrelay/outrelay/examples/local"
	"github.com/outrelay/outrelay/pkg/codec"
	"github.com/outrelay/outrelay/pkg/consumer"
	"github.com/outrelay/outrelay/pkg/consumer/bodystore"
	"github.com/outrelay/outrelay/pkg/event"
	"github.com/outrelay/outrelay/pkg/outbox"
)

// DocumentScanned has the scanned document as its payload.
var DocumentScanned = event.Type[[]byte]{Aggregate: "document", Name: "DocumentScanned", Codec: codec.Raw("application/pdf")}

// threshold is the largest payload in bytes that travels in the record itself.
const threshold = 64 << 10

func main() {
	local.Main(func(ctx context.Context, db *mongo.Database) error {
		if len(os.Args) != 2 {
			return errors.New("usage: claimcheck FILE")
		}
		body, err := os.ReadFile(os.Args[1])
		if err != nil {
			return err
		}
		if err := send(ctx, db, os.Args[1], body); err != nil {
			return err
		}

		c, err := consumer.New("archive", db, consumer.WithBrokers(local.Brokers()...), consumer.WithTopics("outbox.event.document"))
		if err != nil {
			return err
		}
		store, err := register(c, db, func(m *consumer.Message, body []byte) {
			log.Printf("document %s has %d bytes", m.Aggregate.ID, len(body))
		})
		if err != nil {
			return err
		}
		g, ctx := errgroup.WithContext(ctx)
		g.Go(func() error { return c.Run(ctx) })
		g.Go(func() error { return store.Run(ctx) }) // removes bodies that are older than 30 days
		return g.Wait()
	})
}

// send appends the event of a document.
func send(ctx context.Context, db *mongo.Database, id string, body []byte) error {
	store, err := bodystore.NewGridFS(db)
	if err != nil {
		return err
	}
	box, err := outbox.New(db, outbox.WithMiddleware(bodystore.Produce(store, threshold)))
	if err != nil {
		return err
	}
	err = box.Transaction(ctx, func(ctx context.Context) error {
		return box.Append(ctx, DocumentScanned.New(id, body))
	})
	if err != nil {
		return fmt.Errorf("sending document %s: %w", id, err)
	}
	return nil
}

// register adds the handler of documents to c. It returns the store of their bodies.
func register(c *consumer.Consumer, db *mongo.Database, archive func(m *consumer.Message, body []byte)) (*bodystore.GridFS, error) {
	store, err := bodystore.NewGridFS(db)
	if err != nil {
		return nil, err
	}
	handler := consumer.For(DocumentScanned, func(_ context.Context, m *consumer.Message, body []byte) error {
		archive(m, body)
		return nil
	})
	return store, c.Handle("archive", handler, consumer.WithMiddleware(bodystore.Consume(store)))
}
