package consumer_test

import (
	"context"
	"sync/atomic"
	"testing"

	mongoevent "go.mongodb.org/mongo-driver/v2/event"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/pkg/consumer"
)

func TestNewMessagesReadNoMarks(t *testing.T) {
	t.Parallel()
	for name, opts := range map[string][]consumer.Option{"alone": nil, "together": {consumer.WithSharedTransaction(16)}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var reads atomic.Int64
			k := newKit(t, 2, options.Client().SetMonitor(&mongoevent.CommandMonitor{Started: func(_ context.Context, e *mongoevent.CommandStartedEvent) {
				if coll, _ := e.Command.Lookup("aggregate").StringValueOK(); coll == "inbox" {
					reads.Add(1)
				}
			}}))

			const n = 40
			k.publish(newMessages(8, n)...)
			stats := &counts{}
			c := k.newConsumer(append(opts, consumer.WithTelemetry(stats))...)
			addHandler(t, c, "counted", k.insertInto("effects"))
			k.start(c)
			k.waitCount("effects", n)
			if got := reads.Load(); got != 0 {
				t.Errorf("the marks were read %d times for new messages, want 0", got)
			}

			// The same events arrive at other offsets, among new ones, so only their marks reject them.
			k.publish(newMessages(8, 2*n)...)
			k.waitCount("effects", 2*n)
			k.waitUntil("duplicates", func(context.Context) bool { return stats.duplicates.Load() >= n })
			k.checkOnce("effects", 2*n)
			if reads.Load() == 0 {
				t.Error("the marks were never read, although messages had some")
			}
		})
	}
}
