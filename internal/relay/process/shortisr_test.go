package process_test

import (
	"context"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/outrelay/outrelay/pkg/event"
)

// TestN11_ATopicShortOfReplicasStopsNoOther: Kafka rejects a topic because of too few in-sync replicas, in all
// partitions evenly, and its events would fill the memory. The other topic flows. The rejected events follow in order
// when the topic has enough replicas.
func TestN11_ATopicShortOfReplicasStopsNoOther(t *testing.T) {
	t.Parallel()
	b := setup(t)
	short := "short-" + b.topic
	kc, err := kfake.NewCluster(kfake.NumBrokers(1), kfake.SeedTopics(1, b.topic), kfake.SeedTopics(8, short))
	if err != nil {
		t.Fatal(err)
	}

	t.Cleanup(kc.Close)
	var few atomic.Bool
	few.Store(true)
	kc.Fault(kfake.Fault{Keys: []kmsg.Key{kmsg.Produce}, Topic: short, Err: kerr.NotEnoughReplicas, Count: -1, When: func(kmsg.Request) bool { return few.Load() }})
	b.env = append(b.env, "OUTRELAY_KAFKA_BROKERS="+strings.Join(kc.ListenAddrs(), ","))
	const keys, n = 40, 600
	for i := range n {
		if err := b.box.Append(t.Context(), event.New(event.Aggregate{Type: "order", ID: fmt.Sprint("k", i%keys)}, "Placed", event.Bytes("", fmt.Appendf(nil, "%-2000d", i/keys)), event.WithTopic(short))); err != nil {
			t.Fatal(err)
		}
	}

	b.append(1)
	b.start("limits.memory=1MiB", longDrain)
	arrive := func(topic string, n int) (records []*kgo.Record) {
		t.Helper()
		cl, err := kgo.NewClient(kgo.SeedBrokers(kc.ListenAddrs()...), kgo.ConsumeTopics(topic), kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()))
		if err != nil {
			t.Fatal(err)
		}
		defer cl.Close()
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		defer cancel()
		for len(records) < n && ctx.Err() == nil {
			records = append(records, cl.PollFetches(ctx).Records()...)
		}
		if len(records) != n {
			t.Fatalf("%d of %d records of %s arrived", len(records), n, topic)
		}
		return records
	}

	begin := time.Now()
	arrive(b.topic, 1)
	t.Logf("the other topic's event arrived after %s", time.Since(begin).Round(time.Millisecond))
	few.Store(false)
	next := map[string]int{}
	for _, r := range arrive(short, n) {
		var i int
		if _, err := fmt.Sscan(string(r.Value), &i); err != nil || i != next[string(r.Key)] {
			t.Fatalf("key %s: %.20q stands where %d should", r.Key, r.Value, next[string(r.Key)])
		}
		next[string(r.Key)]++
	}
}
