package sink

import (
	"sync/atomic"
	"testing"

	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
)

// TestN08_IdleOffsetGivesWayToASend: a record is sent between the choice of the idle partitions and
// the leader's response. The end in the response may be above that record, so it must not become
// the stored offset.
func TestN08_IdleOffsetGivesWayToASend(t *testing.T) {
	t.Parallel()
	for name, interrupt := range map[string]func(r *testSink) (after func()){
		"queued": func(r *testSink) func() {
			r.mu.Lock()
			r.paused = true
			r.mu.Unlock()
			r.send(t, newRecord("a", "k", "k/1"))
			return func() {}
		},
		"appended and acked": func(r *testSink) func() {
			r.send(t, newRecord("a", "k", "k/1"))
			r.Flush()
			r.acks.waitResolved(2)

			return func() {}
		},
		"quarantined": func(r *testSink) func() {
			r.mu.Lock()
			r.topics["a"].partitions[0].quarantine = true
			r.mu.Unlock()
			return func() {}
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			kc, brokers := newFakeCluster(t, kfake.NumBrokers(1), kfake.SeedTopics(1, "a"))
			r := openSink(t, fakeOptions(brokers...))
			r.send(t, newRecord("a", "k", "k/0"))
			r.Flush()
			r.acks.waitResolved(1)

			r.EndReread()

			idle := func() bool {
				r.refreshIdleOffsets(t.Context(), r.refresher.openTopicNames())
				r.acks.mu.Lock()
				defer r.acks.mu.Unlock()
				_, moved := r.acks.idle[record.TopicPartition{Topic: "a"}]
				clear(r.acks.idle)
				return moved
			}

			stacktest.Eventually(t, "the partition is idle", idle)
			var once atomic.Bool
			after := make(chan func(), 1)
			kc.ControlKey(int16(kmsg.ListOffsets), func(kmsg.Request) (kmsg.Response, error, bool) {
				kc.KeepControl()
				if once.CompareAndSwap(false, true) {
					kc.SleepControl(func() { after <- interrupt(r) })
				}
				return nil, nil, false
			})

			if idle() {
				t.Fatal("the end that the leader reported became the stored offset")
			}
			if !once.Load() {
				t.Fatal("the leader got no request for offsets")
			}
			(<-after)()
		})
	}
}
