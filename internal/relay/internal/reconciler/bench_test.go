package reconciler

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/base/mailbox"
	"github.com/outrelay/outrelay/internal/base/retry"
	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/contract/slot"
	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/relay/internal/ledger"
	"github.com/outrelay/outrelay/internal/relay/stored/lease"
	"github.com/outrelay/outrelay/internal/relay/stored/letters"
	"github.com/outrelay/outrelay/internal/relay/stored/outboxes"
	"github.com/outrelay/outrelay/internal/relay/stored/state"
	"github.com/outrelay/outrelay/internal/relay/stored/waiting"
)

// instant results at once, so the benchmark measures everything except Kafka.
type instant struct{ last atomic.Uint64 }

func (o *instant) Publish(_ context.Context, _ *outboxes.Envelope, topics []string, report func(record.Published)) error {
	p := record.Published{Ticket: record.Side + record.Ticket(o.last.Add(1))}
	for _, t := range topics {
		p.Results = append(p.Results, record.Result{Topic: t, Offset: 1})
	}
	report(p)
	return nil
}
func (o *instant) Settle([]record.Ticket)                           {}
func (o *instant) OpenGate(_, _, _ string)                          {}
func (o *instant) Reached() string                                  { return "9" }
func (o *instant) ReachedBySweep() string                           { return "9" }
func (o *instant) ResumeKey(_, _, _ string)                         {}
func (o *instant) Flush()                                           {}
func (o *instant) RouteTopics(*outboxes.Envelope) ([]string, error) { return []string{"a"}, nil }
func (o *instant) TopicsWithHits() []string                         { return nil }
func (o *instant) FindHits(*outboxes.Envelope) ([]record.Result, []string) {
	return nil, nil
}

// BenchmarkSender drains 10,000 envelopes: parked ones, and retried ones that are all due.
func BenchmarkSender(b *testing.B) {
	for _, reason := range []waiting.Reason{waiting.Parked, waiting.Retry} {
		b.Run(string(reason), func(b *testing.B) {
			client := stacktest.Client(b)
			db := state.Of(stacktest.Database(b, client))
			coll := mongodb.Majority(db.Collection("waiting"))
			for coll, indexes := range map[*mongo.Collection][]mongodb.Index{coll: waiting.Indexes(), db.Collection("letters"): letters.Indexes()} {
				if err := mongodb.EnsureIndexSet(b.Context(), coll, indexes); err != nil {
					b.Fatal(err)
				}
			}
			l := lease.New(lease.Config{Collection: db.Collection("watchers"), ID: "orders/0of1", Node: "a", TTL: 10 * time.Minute, Renew: time.Minute, ReplicaSetID: "here"})
			held, err := l.Acquire(b.Context())
			if err != nil {
				b.Fatal(err)
			}

			const n = 10_000
			for b.Loop() {
				b.StopTimer()
				var part []waiting.Entry
				for i := range n {
					raw, err := bson.Marshal(bson.D{
						{Key: "_id", Value: bson.NewObjectID()},
						{Key: "aggregatetype", Value: "o"},
						{Key: "aggregateid", Value: "k"},
						{Key: "type", Value: "T"},
						{Key: "payload", Value: make([]byte, 500)},
					})
					if err != nil {
						b.Fatal(err)
					}
					e := waiting.Entry{
						Watcher: "orders", NS: "shop.outbox", Raw: raw, Key: fmt.Sprint("k", i%1000), Pos: fmt.Sprintf("82%08d", i),
						Pending: []string{"a"}, Reason: reason, Origin: waiting.OriginStream,
					}
					if reason == waiting.Retry {
						e.NextAt = time.UnixMilli(1)
					}
					if part = append(part, e); len(part) == 1000 {
						if err := waiting.Enter(b.Context(), coll, part); err != nil {
							b.Fatal(err)
						}
						part = nil
					}
				}

				ctx, cancel := context.WithCancel(b.Context())
				done := make(chan struct{})
				var finished atomic.Int64
				store := waiting.NewStore(coll, "orders", slot.Range{})
				onRetry := func(err error) { b.Log(err) }
				led := ledger.New(ledger.Config{
					Fencer: held, Store: store, Letters: db.Collection("letters"), MaxAttempts: 3, Backoff: retry.Reopen, Recording: ledger.RecordPosition,
					Entered: func([]*waiting.Entry) {}, Now: time.Now, OnRetry: onRetry, OnRecovered: func() {},
					Log: slog.New(slog.DiscardHandler),
					Count: func(*ledger.Outcome) {
						if finished.Add(1) == n {
							close(done)
						}
					},
				})
				x := New(Config{
					Store: store, Ledger: led, Outlet: &instant{}, Now: time.Now, Log: slog.New(slog.DiscardHandler), OnRetry: onRetry, OnRecovered: func() {},
					Compacted: func(string) bool { return false }, Entered: mailbox.New[*waiting.Entry](), Ready: mailbox.New[string](),
				})
				// Read only the entries of the index of due envelopes.
				if reason == waiting.Retry {
					x.work.scanAll = false
				}

				var wg sync.WaitGroup
				b.StartTimer()
				wg.Go(func() { _ = x.Run(ctx) })
				wg.Go(func() { _ = led.Run(ctx) })
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
