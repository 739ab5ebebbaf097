package kafka

import (
	"testing"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/outrelay/outrelay/internal/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/kafka/fence"
	"github.com/outrelay/outrelay/internal/record"
)

// TestWhatWasReservedIsReleased: the flag of a redelivery is our own addition, which nobody has reserved for; records are
// encoded anew with it when they leave quarantine, when a batch is split and when one of it is refused. The flag stands
// once.
func TestWhatWasReservedIsReleased(t *testing.T) {
	t.Parallel()
	flagged := func(t *testing.T, brokers []string, topic string, n int) {
		t.Helper()
		log := read(t, brokers, topic)
		inOrder(t, log, 1, n)
		for _, g := range log[0] {
			flags := 0
			for _, h := range g.Headers {
				if h.Key == string(redeliveredHeader.Key) {
					flags++
				}
			}
			if flags != 1 {
				t.Fatalf("%s has %d flags, want one", g.Value, flags)
			}
		}
	}
	t.Run("leaving quarantine", func(t *testing.T) {
		t.Parallel()
		r, topic := successor(t, 0)
		r.mu.Lock()
		r.findOrAddTopicLocked(topic).addPartitions(1)
		r.mu.Unlock()
		p, _ := r.hold(topic)
		p.unreadStretch = true
		for i := range 4 {
			x := rec(topic, "k", "k/"+string(rune('0'+i)))
			if i%2 == 0 { // the caller has flagged it
				x.Headers = append(x.Headers, redeliveredHeader, record.Header{Key: []byte("type"), Value: []byte("T")})
			}
			r.send(t, x)
		}
		tp := record.TopicPartition{Topic: topic}
		for range 2 {
			r.mu.Lock()
			p.quarantine = true
			r.mu.Unlock()
			if err := r.admitTails(t.Context(), map[record.TopicPartition]*fence.Tail{tp: {From: p.ackedEnd, Next: p.ackedEnd, Hits: &fence.Known{}}}); err != nil {
				t.Fatal(err)
			}
		}
		r.run(t)
		r.acks.resolved(4)
		flagged(t, stacktest.Brokers(t), topic, 4)
		r.nothingLeft(t)
	})
	for name, e := range map[string]*kerr.Error{"split": kerr.MessageTooLarge, "encoded anew": kerr.CorruptMessage} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			kc, brokers := fake(t, kfake.NumBrokers(1), kfake.SeedTopics(1, "a"))
			r := open(t, onFake(brokers...))
			r.mu.Lock()
			top := r.findOrAddTopicLocked("a")
			r.mu.Unlock()
			x := rec("a", "k", "k/0")
			x.Headers = append(x.Headers, redeliveredHeader)
			r.send(t, x)
			r.acks.resolved(1)
			kc.Fault(kfake.Fault{Keys: []kmsg.Key{kmsg.Produce}, Topic: "a", Err: e, Count: corruptTries + 1})
			r.mu.Lock()
			top.partitions[0].unreadStretch = true
			r.paused = true
			r.mu.Unlock()
			r.sequence(t, "a", 1, 33)
			r.setPaused(false)
			r.acks.until(patient, "all are acked", func() bool { return len(r.acks.acked) == 33 })
			r.acks.resolved(33)
			flagged(t, brokers, "a", 33)
			r.nothingLeft(t)
		})
	}
}

// nothingLeft checks that nothing counts as in flight.
func (r *rig) nothingLeft(t *testing.T) {
	t.Helper()
	if err := r.Drain(t.Context()); err != nil {
		t.Fatal(err)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.unresolvedRecords != 0 || r.unresolvedBytes != 0 {
		t.Errorf("%d records, %d bytes in flight", r.unresolvedRecords, r.unresolvedBytes)
	}
}
