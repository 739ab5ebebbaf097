// Package admintest makes what operators look at, for tests of what they see.
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
	"github.com/outrelay/outrelay/internal/store"
)

// Fill makes an outbox with delivered envelopes, and dead letters beside it.
func Fill(tb testing.TB, coll *mongo.Collection, envelopes, dead int) {
	tb.Helper()
	if err := store.EnsureIndexes(tb.Context(), coll); err != nil {
		tb.Fatal(err)
	}
	letters := coll.Database().Collection(deadletter.Collection(coll.Name()))
	if err := store.EnsureIndexSet(tb.Context(), letters, deadletter.Indexes()); err != nil {
		tb.Fatal(err)
	}
	insert := func(coll *mongo.Collection, n int, doc func(i int) bson.D) {
		docs := make([]any, 0, 10_000)
		for i := range n {
			if docs = append(docs, doc(i)); len(docs) < cap(docs) && i+1 < n {
				continue
			}
			if _, err := coll.InsertMany(tb.Context(), docs, options.InsertMany().SetOrdered(false)); err != nil {
				tb.Fatal(err)
			}
			docs = docs[:0]
		}
	}
	old := uint32(time.Now().Add(-time.Hour).Unix())
	insert(coll, envelopes, func(i int) bson.D {
		return bson.D{
			{Key: "_id", Value: fmt.Sprintf("e%07d", i)},
			{Key: "ts", Value: bson.Timestamp{T: old, I: uint32(i + 1)}},
			{Key: "aggregatetype", Value: "order"},
			{Key: "aggregateid", Value: fmt.Sprint(i % 1000)},
			{Key: "type", Value: "OrderPlaced"},
			{Key: "payload", Value: "x"},
		}
	})
	insert(letters, dead, func(i int) bson.D {
		at := time.Now().Add(-time.Duration(i) * time.Second)
		return bson.D{
			{Key: "_id", Value: deadletter.ID{NS: store.Namespace(coll), ID: bson.RawValue{Type: bson.TypeInt64, Value: binary.LittleEndian.AppendUint64(nil, uint64(i))}}},
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
