// Package admintest creates outboxes, waiting envelopes and dead letters for tests of the operators' lists.
package admintest

import (
	"context"
	"fmt"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	envelopes "github.com/outrelay/outrelay/internal/contract/envelope"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/relay/stored/letters"
	"github.com/outrelay/outrelay/internal/relay/stored/outboxes"
	"github.com/outrelay/outrelay/internal/relay/stored/waiting"
)

// owner is the owner of a watcher that nobody deposes.
type owner struct{ client *mongo.Client }

// Fenced runs fn in a transaction.
func (o owner) Fenced(ctx context.Context, _ bson.D, fn func(context.Context) error) error {
	return mongodb.InTransaction(ctx, o.client, fn)
}

// Letter returns the dead letter of an envelope of the watcher orders, at a position that is as unique as pos.
func Letter(tb testing.TB, ns, pos string, envelope bson.D) letters.Letter {
	tb.Helper()
	raw, err := bson.Marshal(envelope)
	if err != nil {
		tb.Fatal(err)
	}
	return letters.Letter{
		Watcher: "orders", NS: ns, Raw: raw, Class: "record_rejected", Reason: "rejected (87)", Topic: "orders", Partition: 1,
		Pos: pos, Origin: "stream", Source: letters.Source{Kind: "relay", Watcher: "orders"},
	}
}

// Store stores dead letters in coll as the owner does, and returns their ids.
func Store(tb testing.TB, coll *mongo.Collection, list ...letters.Letter) []string {
	tb.Helper()
	ids := make([]string, len(list))
	prepared := make([]*letters.Prepared, len(list))
	for i, l := range list {
		stored, err := letters.Prepare(l)
		if err != nil {
			tb.Fatal(err)
		}
		prepared[i], ids[i] = stored, stored.ID()
	}

	owner := owner{coll.Database().Client()}
	now, err := mongodb.ServerTime(tb.Context(), owner.client)
	if err == nil {
		err = letters.WriteChunks(tb.Context(), owner, coll, prepared)
	}
	if err == nil {
		err = owner.Fenced(tb.Context(), nil, func(tx context.Context) error { return letters.Write(tx, coll, now, prepared) })
	}
	if err != nil {
		tb.Fatal(err)
	}
	return ids
}

// Waits returns an envelope of the watcher orders that waits since a minute, with the ordering key of its field aggregateid or key.
func Waits(tb testing.TB, ns string, envelope bson.D, reason waiting.Reason, topics ...string) waiting.Entry {
	tb.Helper()
	raw, err := bson.Marshal(envelope)
	if err != nil {
		tb.Fatal(err)
	}
	entry := waiting.Entry{
		Watcher: "orders", NS: ns, Raw: raw, Reason: reason, Origin: waiting.OriginStream, Pending: topics,
		Pos: outboxes.PosAt(bson.Timestamp{T: uint32(time.Now().Add(-time.Minute).Unix())}),
	}
	var view envelopes.View
	if envelopes.Parse(raw, &view) == nil {
		entry.Key = string(view.OrderingKey())
	}
	return entry
}

// StoreWaiting stores waiting envelopes in coll, with its indexes.
func StoreWaiting(tb testing.TB, coll *mongo.Collection, list ...waiting.Entry) {
	tb.Helper()
	if err := mongodb.EnsureIndexSet(tb.Context(), coll, waiting.Indexes()); err != nil {
		tb.Fatal(err)
	}
	for len(list) > 0 {
		n := min(len(list), mongodb.MaxDocuments)
		if err := waiting.Enter(tb.Context(), mongodb.Majority(coll), list[:n]); err != nil {
			tb.Fatal(err)
		}
		list = list[n:]
	}
}

// Fill creates an outbox with the given numbers of delivered envelopes, and dead letters of the watcher orders in
// the collection dead, and their indexes.
func Fill(tb testing.TB, coll *mongo.Collection, delivered int, dead *mongo.Collection, n int) {
	tb.Helper()
	if err := outboxes.EnsureIndexes(tb.Context(), coll); err != nil {
		tb.Fatal(err)
	}
	if err := mongodb.EnsureIndexSet(tb.Context(), dead, letters.Indexes()); err != nil {
		tb.Fatal(err)
	}

	written := uint32(time.Now().Add(-time.Hour).Unix())
	insertMany(tb, coll, delivered, func(i int) bson.D {
		return bson.D{
			{Key: "_id", Value: fmt.Sprintf("e%07d", i)},
			{Key: "ts", Value: bson.Timestamp{T: written, I: uint32(i + 1)}},
			{Key: "aggregatetype", Value: "order"},
			{Key: "aggregateid", Value: fmt.Sprint(i % 1000)},
			{Key: "type", Value: "OrderPlaced"},
			{Key: "payload", Value: "x"},
		}
	})

	insertMany(tb, dead, n, func(i int) bson.D {
		at := time.Now().Add(-time.Duration(i) * time.Second)
		return bson.D{
			{Key: "_id", Value: fmt.Sprintf("dead-%026d", i)},
			{Key: "watcher", Value: "orders"},
			{Key: "ns", Value: mongodb.Namespace(coll)},
			{Key: "id", Value: int64(i)},
			{Key: "delivery", Value: int32(0)},
			{Key: "slot", Value: int32(0)},
			{Key: "pos", Value: fmt.Sprintf("82%016X", i)},
			{Key: "stamp", Value: bson.Timestamp{}},
			{Key: "class", Value: "malformed"},
			{Key: "reason", Value: "no"},
			{Key: "topic", Value: "orders"},
			{Key: "type", Value: "OrderPlaced"},
			{Key: "key", Value: fmt.Sprint(i % 1000)},
			{Key: "size", Value: 100},
			{Key: "attempts", Value: bson.A{}},
			{Key: "source", Value: bson.D{{Key: "kind", Value: "relay"}}},
			{Key: "movedAt", Value: at},
			{Key: "firstFailure", Value: at},
			{Key: "lastFailure", Value: at},
		}
	})
}

// insertMany inserts n documents in statements of up to 10,000.
func insertMany(tb testing.TB, coll *mongo.Collection, n int, newDocument func(i int) bson.D) {
	tb.Helper()
	docs := make([]any, 0, 10_000)
	for i := range n {
		docs = append(docs, newDocument(i))
		if len(docs) < cap(docs) && i+1 < n {
			continue
		}

		if _, err := coll.InsertMany(tb.Context(), docs, options.InsertMany().SetOrdered(false)); err != nil {
			tb.Fatal(err)
		}
		docs = docs[:0]
	}
}
