package bench

import (
	"context"
	"encoding/binary"
	"fmt"
	"strings"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
	"golang.org/x/sync/errgroup"

	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/mongodb/concern"
	"github.com/outrelay/outrelay/internal/relay/stored/outboxes"
	"github.com/outrelay/outrelay/pkg/event"
)

const (
	fillBatch   = 1000
	fillWorkers = 2
	minPayload  = 8 // for the number of the event at its start
)

func orderingKey(i int) string { return fmt.Sprintf("o-%d", i%keyCount) }

// newPayload returns text that looks like data, after the number of the event.
func newPayload(i, size int) []byte {
	const alphabet = `abcdefghij0123456789{}":, `
	payload := make([]byte, size)
	for j := range payload {
		payload[j] = alphabet[(i*31+j*j*7)%len(alphabet)]
	}
	binary.LittleEndian.PutUint64(payload, uint64(i))
	return payload
}

// eventNumber returns the number that newPayload has written.
func eventNumber(payload []byte) (int, bool) {
	if len(payload) < minPayload {
		return 0, false
	}
	return int(binary.LittleEndian.Uint64(payload)), true
}

// newEnvelope returns a document as pkg/outbox would insert it.
func newEnvelope(i, size int) (bson.Raw, error) {
	return newKeyedEnvelope(i, size, orderingKey(i))
}

func newKeyedEnvelope(i, size int, key string) (bson.Raw, error) {
	return encodeEnvelope(key, newPayload(i, size))
}

func encodeEnvelope(key string, payload []byte) (bson.Raw, error) {
	doc, err := event.New(event.Aggregate{Type: aggregate, ID: key}, eventType, event.Bytes("", payload)).MarshalBSON()
	if err != nil {
		return nil, fmt.Errorf("encoding an event: %w", err)
	}
	return doc, nil
}

// newOutbox creates an empty collection with the indexes of the relay, so that the relay does not build them later.
func (b *bench) newOutbox(ctx context.Context, name string) (*mongo.Collection, error) {
	db := b.client.Database(b.db)
	if err := db.CreateCollection(ctx, name); err != nil {
		return nil, fmt.Errorf("creating %s.%s: %w", b.db, name, err)
	}

	coll := db.Collection(name, options.Collection().SetWriteConcern(concern.Majority()))
	if err := outboxes.EnsureIndexes(ctx, coll); err != nil {
		return nil, fmt.Errorf("creating the indexes of %s.%s: %w", b.db, name, err)
	}
	return coll, nil
}

// newForeignEnvelope returns a document as a writer that does not use outrelay would insert it: with an ObjectId, and
// without ts and slot. A field that the relay ignores makes it as large as that of pkg/outbox, so that only the missing
// fields make a difference.
func newForeignEnvelope(i, size int) (bson.Raw, error) {
	own, err := newEnvelope(i, size)
	if err != nil {
		return nil, err
	}
	doc := foreignFields(i, newPayload(i, size))
	raw, err := bson.Marshal(doc)
	if err != nil {
		return nil, err
	}

	const name = "tenant"
	const overhead = 1 + len(name) + 1 + 4 + 1 // type, name, length and end of a text
	pad := max(0, len(own)-len(raw)-overhead)
	return bson.Marshal(append(doc, bson.E{Key: name, Value: strings.Repeat("t", pad)}))
}

// foreignFields are the fields of an envelope that each writer has to insert.
func foreignFields(i int, payload any) bson.D {
	return bson.D{
		{Key: "_id", Value: bson.NewObjectID()},
		{Key: "aggregatetype", Value: aggregate},
		{Key: "aggregateid", Value: orderingKey(i)},
		{Key: "type", Value: eventType},
		{Key: "payload", Value: payload},
	}
}

// fillBacklogs writes the backlog for all drains to a new collection, and with [Options.Foreign] the same events as another
// writer inserts them to a second one. Streams of either begin at b.start.
func (b *bench) fillBacklogs(ctx context.Context) error {
	b.logProgress("writing a backlog of %d events of %d bytes", b.Events, b.Payload)
	targets := []fillTarget{{name: backlog, doc: func(i int) (bson.Raw, error) { return newEnvelope(i, b.Payload) }}}
	if b.Foreign {
		b.logProgress("writing the same events as another writer would")
		targets = append(targets, fillTarget{name: foreignBacklog, doc: func(i int) (bson.Raw, error) { return newForeignEnvelope(i, b.Payload) }})
	}

	for i := range targets {
		var err error
		if targets[i].coll, err = b.newOutbox(ctx, targets[i].name); err != nil {
			return err
		}
	}

	var err error
	if b.start, err = mongodb.ClusterTime(ctx, b.client); err != nil {
		return err
	}
	b.start.I++
	return b.writeBatches(ctx, b.Events, targets...)
}

// fillTarget is a collection and the documents for it.
type fillTarget struct {
	name string
	coll *mongo.Collection
	doc  func(i int) (bson.Raw, error)
}

// writeDocuments inserts n documents.
func (b *bench) writeDocuments(ctx context.Context, coll *mongo.Collection, n int, doc func(i int) (bson.Raw, error)) error {
	return b.writeBatches(ctx, n, fillTarget{coll: coll, doc: doc})
}

// writeBatches inserts n documents into each target, in turn one batch into each. A stream of one target also passes the
// entries of the others in the oplog; written one after the other, only the first target would pay for that.
func (b *bench) writeBatches(over context.Context, n int, targets ...fillTarget) error {
	began := time.Now()

	group, ctx := errgroup.WithContext(over)
	for w := range fillWorkers {
		group.Go(func() error {
			for i := w * fillBatch; i < n; i += fillWorkers * fillBatch {
				for _, t := range targets {
					if err := t.insertBatch(ctx, i, min(i+fillBatch, n)); err != nil {
						return err
					}
				}
			}
			return nil
		})
	}

	if err := group.Wait(); err != nil {
		return err
	}

	b.perDoc = max(b.perDoc, time.Since(began)/time.Duration(max(n, 1)))
	// The server flushes its cache now, and not during a measurement. The user may lack the privilege for it.
	_ = b.client.Database("admin").RunCommand(over, bson.D{{Key: "fsync", Value: 1}}).Err()
	return nil
}

// insertBatch inserts the documents from one number up to, but without, another.
func (t fillTarget) insertBatch(ctx context.Context, first, end int) error {
	docs := make([]any, 0, end-first)
	for i := first; i < end; i++ {
		raw, err := t.doc(i)
		if err != nil {
			return err
		}
		docs = append(docs, raw)
	}

	// Unordered, so that the server need not execute the inserts one after another.
	if _, err := t.coll.InsertMany(ctx, docs, options.InsertMany().SetOrdered(false)); err != nil {
		return fmt.Errorf("writing the backlog: %w", err)
	}
	return nil
}
