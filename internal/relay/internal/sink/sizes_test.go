package sink

import (
	"testing"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
)

// TestReservationsAreReleased: the sink adds the redelivered header, for which no memory was
// reserved. Records are encoded again with it when they leave quarantine, when a batch is split and
// when a record of it is rejected. Each record has the header once, and releases exactly the memory
// that it has reserved.
func TestReservationsAreReleased(t *testing.T) {
	t.Parallel()
	requireFlagged := func(t *testing.T, brokers []string, topic string, n int) {
		t.Helper()
		log := readTopic(t, brokers, topic)
		requireInOrder(t, log, 1, n)
		for _, g := range log[0] {
			flags := 0
			for _, h := range g.Headers {
				if h.Key == string(redeliveredHeader.Key) {
					flags++
				}
			}
			if flags != 1 {
				t.Fatalf("%s has %d redelivered headers, want one", g.Value, flags)
			}
		}
	}

	for name, e := range map[string]*kerr.Error{"split": kerr.MessageTooLarge, "encoded again": kerr.CorruptMessage} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			kc, brokers := newFakeCluster(t, kfake.NumBrokers(1), kfake.SeedTopics(1, "a"))
			r := openSink(t, fakeOptions(brokers...))
			r.mu.Lock()
			top := r.findOrAddTopicLocked("a")
			r.mu.Unlock()
			x := newRecord("a", "k", "k/0")
			x.Headers = append(x.Headers, redeliveredHeader)
			r.send(t, x)
			r.acks.waitResolved(1)

			kc.Fault(kfake.Fault{Keys: []kmsg.Key{kmsg.Produce}, Topic: "a", Err: e, Count: corruptTries + 1})
			r.mu.Lock()
			top.unread = true
			r.paused = true
			r.mu.Unlock()
			r.sendSequence(t, "a", 1, 33)
			r.keeper.setPaused(false)
			r.acks.waitUntil(testTimeout, "all are acked", func() bool { return len(r.acks.acked) == 33 })
			r.acks.waitResolved(33)

			requireFlagged(t, brokers, "a", 33)
			r.requireDrained(t)
		})
	}
}

// requireDrained waits until no record is unresolved.
func (r *testSink) requireDrained(t *testing.T) {
	t.Helper()
	r.Flush()
	stacktest.Eventually(t, "no record is unresolved", func() bool {
		r.mu.Lock()
		defer r.mu.Unlock()
		return r.batches.unresolvedRecords == 0 && r.batches.unresolvedBytes == 0
	})
}
