package consumer_test

import (
	"context"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/segmentio/kafka-go"
	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/mongodb/transaction"
	"github.com/outrelay/outrelay/pkg/consumer"
	"github.com/outrelay/outrelay/pkg/telemetry"
)

const benchMessages = 2000

func benchKit(b *testing.B) *kit {
	b.Helper()
	k := newKit(b, 4)
	k.newCollection("effects")
	for i := range benchMessages / 500 {
		ms := make([]*consumer.Message, 500)
		for j := range ms {
			ms[j] = newMessage(fmt.Sprintf("key%02d", j%64), "counted", fmt.Sprint(i*500+j))
		}
		k.publish(ms...)
	}
	return k
}

// BenchmarkConsumer is a handler with one insert, by the inbox's mode.
func BenchmarkConsumer(b *testing.B) {
	for _, mode := range []consumer.Mode{consumer.Transactional, consumer.AtLeastOnceInTransaction} {
		b.Run(mode.String(), func(b *testing.B) {
			for b.Loop() {
				b.StopTimer()
				k := benchKit(b)
				var n atomic.Int64
				stats := &handledBy{n: &n, done: make(chan struct{})}
				c := k.newConsumer(consumer.WithMode(mode), consumer.WithTelemetry(stats))
				coll := k.db.Collection("effects")
				addHandler(b, c, "counted", func(ctx context.Context, m *consumer.Message) error {
					_, err := coll.InsertOne(ctx, bson.D{{Key: "id", Value: m.ID}})
					return err
				})

				b.StartTimer()
				began := time.Now()
				stop := k.start(c)
				k.waitFor("all messages", stats.done)

				b.ReportMetric(benchMessages/time.Since(began).Seconds(), "messages/s")

				b.StopTimer()
				stop()
				b.StartTimer()
			}
		})
	}
}

type handledBy struct {
	telemetry.Discard
	n    *atomic.Int64
	done chan struct{}
}

func (h *handledBy) Measure(m telemetry.Measurement) {
	if m.Metric == telemetry.Handled && h.n.Add(m.N) == benchMessages {
		close(h.done)
	}
}

// BenchmarkNaive is what one writes without this package: a Reader's loop with a transaction, a marker and a commit of the
// offset for each record.
func BenchmarkNaive(b *testing.B) {
	for b.Loop() {
		b.StopTimer()

		k := benchKit(b)
		markers, coll := k.newCollection("markers"), k.db.Collection("effects")
		ctx, cancel := context.WithCancel(b.Context())

		b.StartTimer()
		began := time.Now()
		r := kafka.NewReader(kafka.ReaderConfig{Brokers: k.cfg.Brokers, GroupID: k.group, Topic: k.topic, MaxWait: 100 * time.Millisecond, CommitInterval: time.Second})

		for range benchMessages {
			m, err := r.FetchMessage(ctx)
			if err != nil {
				b.Fatal(err)
			}

			err = transaction.Run(ctx, k.db.Client(), func(ctx context.Context) error {
				if _, err := markers.InsertOne(ctx, bson.D{{Key: "_id", Value: string(m.Headers[0].Value)}}); err != nil {
					return err
				}
				_, err := coll.InsertOne(ctx, bson.D{{Key: "id", Value: string(m.Headers[0].Value)}})
				return err
			})
			if err != nil {
				b.Fatal(err)
			}

			if err := r.CommitMessages(ctx, m); err != nil {
				b.Fatal(err)
			}
		}

		b.ReportMetric(benchMessages/time.Since(began).Seconds(), "messages/s")
		b.StopTimer()
		cancel()
		_ = r.Close()
		b.StartTimer()
	}
}
