// Package admintest creates outboxes and dead letters for tests of the operators' lists.
package admintest

import (
	"encoding/binary"
	"fmt"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/deadletter"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/outboxes"
)

// Fill creates an outbox with the given numbers of delivered envelopes and dead letters, and their
// indexes.
func Fill(tb testing.TB, coll *mongo.Collection, envelopes, dead int) {
	tb.Helper()
	if err := outboxes.EnsureIndexes(tb.Context(), coll); err != nil {
		tb.Fatal(err)
	}
	letters := coll.Database().Collection(deadletter.Collection(coll.Name()))
	if err := mongodb.EnsureIndexSet(tb.Context(), letters, deadletter.Indexes()); err != nil {
		tb.Fatal(err)
	}

	written := uint32(time.Now().Add(-time.Hour).Unix())
	insertMany(tb, coll, envelopes, func(i int) bson.D {
		return bson.D{
			{Key: "_id", Value: fmt.Sprintf("e%07d", i)},
			{Key: "ts", Value: bson.Timestamp{T: written, I: uint32(i + 1)}},
			{Key: "aggregatetype", Value: "order"},
			{Key: "aggregateid", Value: fmt.Sprint(i % 1000)},
			{Key: "type", Value: "OrderPlaced"},
			{Key: "payload", Value: "x"},
		}
	})

	insertMany(tb, letters, dead, func(i int) bson.D {
		id := bson.RawValue{Type: bson.TypeInt64, Value: binary.LittleEndian.AppendUint64(nil, uint64(i))}
		at := time.Now().Add(-time.Duration(i) * time.Second)
		return bson.D{
			{Key: "_id", Value: deadletter.ID{NS: mongodb.Namespace(coll), ID: id}},
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
