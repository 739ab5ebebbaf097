package waiting

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/envelope"
	"github.com/outrelay/outrelay/internal/lease"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/outboxes"
	"github.com/outrelay/outrelay/internal/record"
	"github.com/outrelay/outrelay/internal/retry"
)

// instant answers at once, so the benchmark measures everything except Kafka.
type instant struct{ last atomic.Uint64 }

func (o *instant) Publish(_ context.Context, _ *outboxes.Envelope, topics []string, answer func(record.Published)) error {
	p := record.Published{Ticket: record.Side + record.Ticket(o.last.Add(1))}
	for _, t := range topics {
		p.Answers = append(p.Answers, record.Answer{Topic: t, Offset: 1})
	}
	answer(p)
	return nil
}
func (o *instant) Settle([]record.Ticket)   {}
func (o *instant) OpenGate(_, _, _ string)  {}
func (o *instant) Reached() string          { return "9" }
func (o *instant) ResumeKey(_, _, _ string) {}
func (o *instant) Flush()                   {}

// BenchmarkExceptions drains 10,000 envelopes: parked ones, and requeued ones that are all due.
func BenchmarkExceptions(b *testing.B) {
	for _, state := range []string{"parked", "retry"} {
		b.Run(state, func(b *testing.B) {
			client := stacktest.Client(b)
			db := stacktest.Database(b, client)
			coll := mongodb.Majority(db.Collection("outbox"))
			if err := outboxes.EnsureIndexes(b.Context(), coll); err != nil {
				b.Fatal(err)
			}

			l := lease.New(lease.Config{Collection: db.Collection("watchers"), ID: "orders/0of1", Node: "a", TTL: 10 * time.Minute, Renew: time.Minute, ReplicaSetID: "here"})
			held, err := l.Acquire(b.Context())
			if err != nil {
				b.Fatal(err)
			}

			const n = 10_000
			for b.Loop() {
				b.StopTimer()

				docs := make([]any, n)
				for i := range docs {
					d := bson.D{
						{Key: "_id", Value: bson.NewObjectID()},
						{Key: "aggregatetype", Value: "o"},
						{Key: "aggregateid", Value: "k"},
						{Key: "type", Value: "T"},
						{Key: "payload", Value: make([]byte, 500)},
						{Key: "key", Value: fmt.Sprint("k", i%1000)},
						{Key: "state", Value: state},
						{Key: "pos", Value: fmt.Sprintf("82%08d", i)},
						{Key: "pending", Value: bson.A{"a"}},
						{Key: "origin", Value: "stream"},
					}
					if state == "retry" {
						d = append(d, bson.E{Key: "nextAt", Value: time.UnixMilli(1)})
					}
					docs[i] = d
				}
				if _, err := coll.InsertMany(b.Context(), docs); err != nil {
					b.Fatal(err)
				}

				ctx, cancel := context.WithCancel(b.Context())
				done := make(chan struct{})
				var finished atomic.Int64
				out := &instant{}
				shared := Shared{
					Client: client, Fencer: held, Outlet: out, Now: time.Now, Log: slog.New(slog.DiscardHandler),
					OnRetry: func(err error) { b.Log(err) }, OnRecovered: func() {},
				}
				f := NewFinisher(FinisherConfig{
					Shared: shared, Retry: retry.Reopen, MaxAttempts: 3,
					Count: func(End, record.Class) {
						if k := finished.Add(1); k == n {
							close(done)
						}
					},
				})

				x := New(Config{
					Shared: shared, Finisher: f,
					Check: func(*envelope.View) error { return nil }, Compacted: func(string) bool { return false },
					Route:       func(*outboxes.Envelope) ([]string, error) { return nil, errors.New("only the outlet routes") },
					Collections: func() []outboxes.Outbox { return []outboxes.Outbox{{DB: db.Name(), Coll: "outbox"}} },
				})
				// Read only the entries of the index of due envelopes.
				if state == "retry" {
					x.work.scanAll = false
				}

				var wg sync.WaitGroup
				b.StartTimer()
				wg.Go(func() { _ = x.Run(ctx) })
				wg.Go(func() { _ = f.Run(ctx) })
				<-done
				b.StopTimer()

				cancel()
				wg.Wait()
				b.StartTimer()
			}
			b.ReportMetric(float64(n)*float64(b.N)/b.Elapsed().Seconds(), "envelopes/s")
		})
	}
}
