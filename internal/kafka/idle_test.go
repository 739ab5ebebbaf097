package kafka

import (
	"sync/atomic"
	"testing"

	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/outrelay/outrelay/internal/record"
)

// TestN08_IdleOffsetGivesWayToASend: between the choice of the idle partitions and the leader's answer a record is sent. The
// answer may lie above the place of that record, and must not become the stored offset.
func TestN08_IdleOffsetGivesWayToASend(t *testing.T) {
	t.Parallel()
	for name, meanwhile := range map[string]func(r *rig) (after func()){
		"queued": func(r *rig) func() {
			r.mu.Lock()
			r.paused = true
			r.mu.Unlock()
			r.send(t, rec("a", "k", "k/1"))
			return func() {}
		},
		"appended and acked": func(r *rig) func() {
			r.send(t, rec("a", "k", "k/1"))
			r.Flush()
			r.acks.resolved(2)
			return func() {}
		},
		"quarantined": func(r *rig) func() {
			r.mu.Lock()
			r.topics["a"].partitions[0].quarantine = true
			r.mu.Unlock()
			return func() {}
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			kc, brokers := fake(t, kfake.NumBrokers(1), kfake.SeedTopics(1, "a"))
			r := open(t, onFake(brokers...))
			r.send(t, rec("a", "k", "k/0"))
			r.Flush()
			r.acks.resolved(1)
			r.EndReplay()
			idle := func() bool {
				r.refreshIdleOffsets(t.Context())
				r.acks.mu.Lock()
				defer r.acks.mu.Unlock()
				_, told := r.acks.idle[record.TopicPartition{Topic: "a"}]
				clear(r.acks.idle)
				return told
			}
			until(t, "the partition is idle", idle)
			var once atomic.Bool
			after := make(chan func(), 1)
			kc.ControlKey(int16(kmsg.ListOffsets), func(kmsg.Request) (kmsg.Response, error, bool) {
				kc.KeepControl()
				if once.CompareAndSwap(false, true) {
					kc.SleepControl(func() { after <- meanwhile(r) })
				}
				return nil, nil, false
			})
			if idle() {
				t.Fatal("the leader's answer became the stored offset")
			}
			if !once.Load() {
				t.Fatal("the leader was not asked")
			}
			(<-after)()
		})
	}
}
