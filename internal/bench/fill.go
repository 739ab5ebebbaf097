package bench

import (
	"context"
	"encoding/binary"
	"fmt"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
	"go.mongodb.org/mongo-driver/v2/mongo/writeconcern"
	"golang.org/x/sync/errgroup"

	"github.com/outrelay/outrelay/internal/store"
	"github.com/outrelay/outrelay/pkg/event"
)

const (
	fillBatch   = 1000
	fillWorkers = 2
	minPayload  = 8 // the event's number stands at its beginning
)

func key(i int) string { return fmt.Sprintf("o-%d", i%keyCount) }

// payload is text that looks like data, with its number in front.
func payload(i, size int) []byte {
	const alphabet = `abcdefghij0123456789{}":, `
	p := make([]byte, size)
	for j := range p {
		p[j] = alphabet[(i*31+j*j*7)%len(alphabet)]
	}
	binary.LittleEndian.PutUint64(p, uint64(i))
	return p
}

// number is what payload put in front.
func number(payload []byte) (int, bool) {
	if len(payload) < minPayload {
		return 0, false
	}
	return int(binary.LittleEndian.Uint64(payload)), true
}

// envelope is a document as pkg/outbox would insert it.
func envelope(i, size int) (bson.Raw, error) {
	return keyed(i, size, key(i))
}

func keyed(i, size int, key string) (bson.Raw, error) {
	doc, err := event.New(aggregate, key, eventType, payload(i, size)).MarshalBSON()
	if err != nil {
		return nil, fmt.Errorf("encoding an event: %w", err)
	}
	return doc, nil
}

// outbox makes an empty collection with the indexes that the relay would make, so that it has nothing to build later.
func (b *bench) outbox(ctx context.Context, name string) (*mongo.Collection, error) {
	db := b.client.Database(b.db)
	if err := db.CreateCollection(ctx, name); err != nil {
		return nil, fmt.Errorf("creating %s.%s: %w", b.db, name, err)
	}
	coll := db.Collection(name, options.Collection().SetWriteConcern(writeconcern.Majority()))
	if err := store.EnsureIndexes(ctx, coll); err != nil {
		return nil, fmt.Errorf("indexes of %s.%s: %w", b.db, name, err)
	}
	return coll, nil
}

// fill writes the backlog that is drained, again and again, and returns the time from which the stream has it.
func (b *bench) fill(ctx context.Context) (bson.Timestamp, error) {
	coll, err := b.outbox(ctx, backlog)
	if err != nil {
		return bson.Timestamp{}, err
	}
	start, err := store.ClusterTime(ctx, b.client)
	if err != nil {
		return start, err
	}
	start.I++
	if err := b.write(ctx, coll, b.Events, func(i int) (bson.Raw, error) { return envelope(i, b.Payload) }); err != nil {
		return start, err
	}
	return start, nil
}

// write inserts n documents.
func (b *bench) write(over context.Context, coll *mongo.Collection, n int, doc func(i int) (bson.Raw, error)) error {
	began := time.Now()
	g, ctx := errgroup.WithContext(over)
	for w := range fillWorkers {
		g.Go(func() error {
			docs := make([]any, 0, fillBatch)
			for i := w * fillBatch; i < n; i += fillWorkers * fillBatch {
				docs = docs[:0]
				for j := i; j < min(i+fillBatch, n); j++ {
					d, err := doc(j)
					if err != nil {
						return err
					}
					docs = append(docs, d)
				}
				if _, err := coll.InsertMany(ctx, docs, options.InsertMany().SetOrdered(false)); err != nil {
					return fmt.Errorf("writing the backlog: %w", err)
				}
			}
			return nil
		})
	}
	if err := g.Wait(); err != nil {
		return err
	}
	b.perDoc = max(b.perDoc, time.Since(began)/time.Duration(max(n, 1)))
	// What the writing left to do for the server's cache is not part of what is measured. Not everybody may ask for it.
	_ = b.client.Database("admin").RunCommand(over, bson.D{{Key: "fsync", Value: 1}}).Err()
	return nil
}
