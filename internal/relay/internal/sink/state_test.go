package sink

import (
	"context"
	"net"
	"sync/atomic"
	"testing"
	"time"

	"github.com/outrelay/outrelay/internal/kafkawire"
	"github.com/segmentio/kafka-go"
	"github.com/twmb/franz-go/pkg/kfake"

	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
)

// TestStateListsOnlyTargetsWithRecords: a missing topic that gets no records does not appear in State.
func TestStateListsOnlyTargetsWithRecords(t *testing.T) {
	t.Parallel()
	_, brokers := newFakeCluster(t, kfake.NumBrokers(1), kfake.SeedTopics(2, "a", "b"))
	u := fakeOptions(brokers...)
	u.noRun = true
	r := openSink(t, u)
	r.mu.Lock()
	r.findOrAddTopicLocked("a").addPartitions(2)
	r.findOrAddTopicLocked("b").addPartitions(2)
	r.topics["b"].partitions[1].quarantine = true
	r.topics["b"].partitions[1].setObstacle(obstacle{kindQuarantined, "sick", ""}, time.Now())
	r.mu.Unlock()

	r.refresher.applyLayout(&kafkawire.Layout{Topics: map[string]kafkawire.TopicLayout{
		"a": {Err: kafka.UnknownTopicOrPartition},
		"b": {Partitions: []kafkawire.PartitionLayout{{Leader: -1}, {Leader: -1}}},
	}})
	if state := r.State(); len(state) != 0 {
		t.Fatalf("nothing waits, but the state is %+v", state)
	}

	for _, target := range []record.TopicPartition{{Topic: "a", Partition: 0}, {Topic: "a", Partition: 1}, {Topic: "b", Partition: 0}} {
		x := newRecord(target.Topic, "k", "1")
		x.Partition = target.Partition
		r.send(t, x)
	}
	state := r.State()
	if len(state) != 3 || state[0].Topic != "a" || state[1].Partition != 1 ||
		state[2].Topic != "b" || state[2].Kind != kindNoLeader {
		t.Fatalf("state %+v, want two partitions of a, and one of b", state)
	}
	for _, b := range r.State() {
		if b.Records != 1 || b.Reason() == "" || b.Since.IsZero() {
			t.Errorf("target %+v, want one record, a reason and a time", b)
		}
	}
}

// TestStateNamesTheNeededPartitions: a topic that was deleted, or created again with fewer partitions, needs the number it had.
func TestStateNamesTheNeededPartitions(t *testing.T) {
	t.Parallel()
	_, brokers := newFakeCluster(t, kfake.NumBrokers(1), kfake.SeedTopics(3, "a", "b"))
	options := fakeOptions(brokers...)
	options.noRun = true
	opened := openSink(t, options)
	opened.mu.Lock()
	opened.findOrAddTopicLocked("a").addPartitions(3)
	opened.findOrAddTopicLocked("b").addPartitions(3)
	opened.mu.Unlock()

	opened.refresher.applyLayout(&kafkawire.Layout{Topics: map[string]kafkawire.TopicLayout{
		"a": {Err: kafka.UnknownTopicOrPartition},
		"b": {Partitions: []kafkawire.PartitionLayout{{Leader: 1}}},
	}})
	for _, topic := range []string{"a", "b"} {
		sent := newRecord(topic, "k", "1")
		sent.Partition = 2
		opened.send(t, sent)
	}
	state := opened.State()
	if len(state) != 2 || state[0].Kind != kindMissing || state[0].Partitions != 3 || state[1].Kind != kindTooSmall || state[1].Partitions != 3 {
		t.Errorf("state %+v, want a missing topic and a too small one that need 3 partitions", state)
	}
}

// TestN02_TheGateIsAskedRightBeforeTheWrite: the lease may expire while a connection is opened, or
// while the process is suspended.
func TestN02_TheGateIsAskedRightBeforeTheWrite(t *testing.T) {
	t.Parallel()
	_, brokers := newFakeCluster(t, kfake.NumBrokers(1), kfake.SeedTopics(1, "a"))
	var lapses, shut atomic.Bool
	var checks atomic.Int32
	u := fakeOptions(brokers...)
	u.cfg.Dial = func(ctx context.Context, network, addr string) (net.Conn, error) {
		if lapses.Load() {
			shut.Store(true)
		}
		return (&net.Dialer{}).DialContext(ctx, network, addr)
	}

	u.gate = func() bool {
		if shut.Load() {
			checks.Add(1)
		}
		return !shut.Load()
	}

	r := openSink(t, u)
	r.send(t, newRecord("a", "k", "k/0"))
	r.Flush()
	r.acks.waitResolved(1)

	r.mu.Lock()
	k := r.loops.byID[loopID{}].link
	r.mu.Unlock()
	k.Close()

	lapses.Store(true)
	r.send(t, newRecord("a", "k", "k/1"))
	r.Flush()
	stacktest.Eventually(t, "the gate is checked again", func() bool {
		r.acks.mu.Lock()
		defer r.acks.mu.Unlock()
		if shut.Load() && len(r.acks.acked) > 1 {
			t.Fatal("a record was sent past the deadline of the lease")
		}
		return checks.Load() > 5
	})

	lapses.Store(false)
	shut.Store(false)
	r.acks.waitResolved(2)
}

// A topic that was just created has no leader for a moment, which is no error.
func TestAnObstacleOfANewTopicIsLoggedOnceItLasts(t *testing.T) {
	t.Parallel()
	began := time.Now()
	for _, c := range []struct {
		kind    string
		creates bool
		atOnce  bool
	}{{kindNoLeader, false, false}, {kindMissing, true, false}, {kindMissing, false, true}, {kindForbidden, true, true}} {
		o := &obstruction{}

		set := func(kind string, after time.Duration) bool {
			o.updateObstacle(obstacle{kind, "why", ""}, began.Add(after), obstacle.parksTopic)
			return o.takeLog(began.Add(after), creation(c.creates))
		}

		if got := set(c.kind, 0); got != c.atOnce {
			t.Errorf("%s is logged at once: %v, want %v", c.kind, got, c.atOnce)
		}
		if got := set(c.kind, settleTime); got == c.atOnce {
			t.Errorf("%s is logged after %v: %v, want %v", c.kind, settleTime, got, !c.atOnce)
		}

		if set(c.kind, 2*settleTime) {
			t.Errorf("%s is logged twice", c.kind)
		}
		// A missing topic that is created by hand has no leader for a moment, too.
		if set(kindNoLeader, 2*settleTime) && c.kind != kindNoLeader {
			t.Errorf("a missing leader after %s is logged at once", c.kind)
		}
		if !set(kindRejected, 2*settleTime) {
			t.Errorf("another reason after %s is not logged", c.kind)
		}
	}
}
