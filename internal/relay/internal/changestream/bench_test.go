package changestream

import (
	"context"
	"log/slog"
	"runtime"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/relay/changes"
)

const benchEvents = 50_000

// insertBenchEvents writes the events for a drain. Each has 1 KB, like an envelope.
func insertBenchEvents(b *testing.B, client *mongo.Client) (*mongo.Collection, bson.Timestamp) {
	b.Helper()
	coll := stacktest.Database(b, client).Collection("outbox")
	at, err := mongodb.ClusterTime(b.Context(), client)
	if err != nil {
		b.Fatal(err)
	}

	docs, payload := make([]any, 1000), make([]byte, 800)
	for range benchEvents / len(docs) {
		for i := range docs {
			docs[i] = bson.D{
				{Key: "_id", Value: bson.NewObjectID()},
				{Key: "ts", Value: bson.Timestamp{}},
				{Key: "aggregatetype", Value: "order"},
				{Key: "aggregateid", Value: "o-4711"},
				{Key: "type", Value: "OrderPlaced"},
				{Key: "payload", Value: payload},
			}
		}
		if _, err := coll.InsertMany(b.Context(), docs, options.InsertMany().SetOrdered(false)); err != nil {
			b.Fatal(err)
		}
	}

	return coll, at
}

// reportDrain repeats a drain and reports its rate. drain returns the time that the read itself took.
func reportDrain(b *testing.B, drain func() time.Duration) {
	b.Helper()
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	n, took := 0, time.Duration(0)

	for b.Loop() {
		took += drain()
		n += benchEvents
	}

	runtime.ReadMemStats(&after)
	b.ReportMetric(float64(n)/took.Seconds(), "events/s")
	b.ReportMetric(float64(after.Mallocs-before.Mallocs)/float64(n), "allocs/event")
	b.ReportMetric(0, "ns/op")
}

// BenchmarkDrain reads the same prepared events with the driver alone and through the stream. It
// parses them in both cases.
func BenchmarkDrain(b *testing.B) {
	client := stacktest.Client(b)
	coll, at := insertBenchEvents(b, client)
	scope, err := changes.ParseScope([]string{coll.Database().Name() + ".outbox"})
	if err != nil {
		b.Fatal(err)
	}

	b.Run("driver", func(b *testing.B) {
		reportDrain(b, func() time.Duration {
			begin := time.Now()
			cs, err := coll.Watch(b.Context(), scope.Pipeline(), options.ChangeStream().SetBatchSize(0).
				SetMaxAwaitTime(500*time.Millisecond).SetShowExpandedEvents(true).SetStartAtOperationTime(&at))
			if err != nil {
				b.Fatal(err)
			}
			defer cs.Close(context.WithoutCancel(b.Context()))
			cs.SetBatchSize(changes.MaxDocuments)
			var ev changes.Event

			for n := 0; n < benchEvents; {
				if cs.TryNext(b.Context()) {
					if err := changes.Parse(cs.Current, &ev); err != nil {
						b.Fatal(err)
					}
					n++
				} else if cs.Err() != nil {
					b.Fatal(cs.Err())
				}
			}

			return time.Since(begin)
		})
	})

	b.Run("stream", func(b *testing.B) {
		s, err := New(Config{Client: client, Scope: scope, Log: slog.New(slog.DiscardHandler)})
		if err != nil {
			b.Fatal(err)
		}
		reportDrain(b, func() time.Duration {
			begin := time.Now()
			ctx, cancel := context.WithCancel(b.Context())
			out, done := make(chan *changes.Batch), make(chan struct{})
			go func() {
				defer close(done)
				_ = s.Run(ctx, changes.Start{At: &at}, out)
			}()

			var ev changes.Event
			for n := 0; n < benchEvents; {
				batch := <-out
				for _, raw := range batch.Docs {
					if err := changes.Parse(raw, &ev); err != nil {
						b.Fatal(err)
					}
				}
				n += len(batch.Docs)
				batch.Release()
			}

			took := time.Since(begin)
			cancel()
			<-done
			return took
		})
	})
}
