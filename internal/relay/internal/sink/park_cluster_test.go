package sink

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/segmentio/kafka-go"

	"github.com/outrelay/outrelay/internal/base/retry"
	"github.com/outrelay/outrelay/internal/kafkawire"
	"github.com/outrelay/outrelay/internal/lab/devstack"
	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
)

// createTopicOn creates a topic whose partitions have one replica each, on these brokers, and returns its name.
func createTopicOn(t *testing.T, s *devstack.Stack, brokers ...int) string {
	t.Helper()
	tr := &kafka.Transport{MetadataTTL: 100 * time.Millisecond}
	t.Cleanup(tr.CloseIdleConnections)
	cl := &kafka.Client{Addr: kafka.TCP(s.Brokers()...), Transport: tr, Timeout: 10 * time.Second}
	name := stacktest.Name(t) + strings.ReplaceAll(strings.Trim(fmt.Sprint(brokers), "[]"), " ", "-")
	var replicas []kafka.ReplicaAssignment
	for i, broker := range brokers {
		replicas = append(replicas, kafka.ReplicaAssignment{Partition: i, Replicas: []int{broker}})
	}

	ctx, cancel := context.WithTimeout(t.Context(), testTimeout)
	defer cancel()
	back := retry.Reopen.Start()
	for {
		res, err := cl.CreateTopics(ctx, &kafka.CreateTopicsRequest{Topics: []kafka.TopicConfig{{
			Topic:              name,
			NumPartitions:      -1,
			ReplicationFactor:  -1,
			ReplicaAssignments: replicas,
		}}})
		if err == nil {
			err = res.Errors[name]
		}
		if err == nil || errors.Is(err, kafka.TopicAlreadyExists) {
			break
		}

		// The controller may not have registered the broker yet.
		if !errors.Is(err, kafka.BrokerNotAvailable) || back.Wait(ctx) != nil {
			t.Fatal(err)
		}
	}

	// A broker without the topic in its metadata would cause it to be parked.
	for _, addr := range s.Brokers() {
		c := newClient(t, testConfig{Brokers: []string{addr}})
		stacktest.Eventually(t, addr+" has the topic in its metadata", func() bool {
			l, err := c.Metadata(ctx, []string{name})
			if err != nil {
				return false
			}
			parts := l.Topics[name].Partitions
			return slices.EqualFunc(parts, brokers, func(p kafkawire.PartitionLayout, broker int) bool {
				return p.Leader == int32(broker)
			})
		})
	}
	return name
}

// TestN11_ALeaderlessPartitionIsParked: one of three real brokers stops responding under load, in
// the middle of a request, and comes back. In the meantime its partition is parked, and the others
// accept records, also the partitions of a topic that gets its first records now. No record is lost, sent twice or out of
// order.
func TestN11_ALeaderlessPartitionIsParked(t *testing.T) {
	t.Parallel()
	props := map[string]string{"broker.session.timeout.ms": "6000"}
	s := stacktest.Own(t, devstack.Options{Brokers: 3, Quick: true, Kafka: devstack.KafkaOptions{Props: props}})
	sick, well, unused := createTopicOn(t, s, 3), createTopicOn(t, s, 1), createTopicOn(t, s, 3, 1)
	d := openWithHolder(t, sinkOptions{cfg: testConfig{Brokers: s.Brokers(), ParkAfter: 500 * time.Millisecond}})

	n := 0
	both := func(times int) {
		for range times {
			if _, err := d.send(newRecord(well, "k", fmt.Sprintf("k/%d", n))); err != nil {
				t.Fatalf("the healthy topic: %v", err)
			}
			_, _ = d.send(newRecord(sick, fmt.Sprint("k", n%5), fmt.Sprintf("k%d/%d", n%5, n/5)))
			n++
		}
		d.r.Flush()
	}

	both(50)
	d.waitResolved(100)

	broker := s.Kafkas()[2]
	if err := broker.Pause(); err != nil {
		t.Fatal(err)
	}
	resumed := false
	resume := func() {
		if resumed {
			return
		}
		resumed = true
		if err := broker.Resume(); err != nil {
			t.Fatal(err)
		}
	}

	t.Cleanup(resume)
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	parked := func() bool { _, ok := d.parkedCount(sick, 0); return ok }
	deadline := time.Now().Add(2 * testTimeout)
	for !parked() {
		if time.Now().After(deadline) {
			t.Fatalf("not parked: %+v", d.r.State())
		}
		both(5)
		<-tick.C
	}

	state := d.r.State()
	i := slices.IndexFunc(state, func(b Unwritable) bool { return b.Topic == sick })
	if state[i].Kind != kindNoLeader && state[i].Kind != kindUnreachable {
		t.Errorf("parked as %+v, want no_leader or unreachable", state[i])
	}

	both(50)
	d.r.requireDrained(t)
	d.r.mu.Lock()
	unread := d.r.topics[sick].partitions[0].needsReadBack
	d.r.mu.Unlock()
	if !unread {
		t.Error("the partition does not have to be read back, although a request hangs")
	}

	const newKeys = 8
	sendToUnused := func(round int) {
		for i := range newKeys {
			_, _ = d.send(newRecord(unused, fmt.Sprint("k", i), fmt.Sprintf("k%d/%d", i, round)))
		}
		d.r.Flush()
	}
	inReach := 0
	for i := range newKeys {
		if kafkawire.ChoosePartition(fmt.Append(nil, "k", i), 2) == 1 {
			inReach++
		}
	}
	sendToUnused(0)
	stacktest.Eventually(t, "the new topic is used where it has a leader", func() bool {
		// The topic was parked for a moment.
		d.tryRelease()
		return countAcked(d.r.acks, unused) == inReach
	}, func() any { return d.r.State() })

	resume()
	if err := d.r.waitEnded(t); !errors.Is(err, ErrReopen) {
		t.Fatalf("the sink ended with %v, want ErrReopen", err)
	}
	d.openNext()
	stacktest.Eventually(t, "all of it is released", func() bool {
		// The partition may have been in quarantine for a moment.
		if d.heldCount() > 0 {
			d.tryRelease()
		}
		return d.heldCount() == 0
	})

	both(50)
	sendToUnused(1)
	d.waitResolved(2*n + 2*newKeys)
	requireInOrder(t, readTopic(t, s.Brokers(), unused), newKeys, 2)
	for topic, keys := range map[string]int{well: 1, sick: 5} {
		requireInOrder(t, readTopic(t, s.Brokers(), topic), keys, n/keys)
	}
}

// countAcked returns the number of records that were acked in a topic.
func countAcked(l *ledger, topic string) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	n := 0
	for _, at := range l.acked {
		if at.tp.Topic == topic {
			n++
		}
	}
	return n
}
