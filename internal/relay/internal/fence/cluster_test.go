package fence

import (
	"context"
	"errors"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/segmentio/kafka-go"

	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/lab/devstack"
	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
)

// newPartitions creates four partitions. While broker 3 is away, 0 and 1 are healthy, 2 has no leader, and 3 is below its minimum of
// in-sync replicas and still readable. (2 is in a separate topic: with a minimum of 2 and one replica, Kafka 4.3 would not
// elect that replica again after kill -9.)
func (k cluster) newPartitions(tb testing.TB) []record.TopicPartition {
	three, one := k.placeTopic(tb, "2", [][]int{{1, 2}, {2, 1}, {1, 3}}), k.placeTopic(tb, "1", [][]int{{3}})
	return []record.TopicPartition{at(three, 0), at(three, 1), at(one, 0), at(three, 2)}
}

func ownerOf(tb testing.TB, parts []record.TopicPartition) *owner {
	return &owner{id: "tx-" + stacktest.Name(tb), offsets: map[string][]int64{parts[0].Topic: make([]int64, 3), parts[2].Topic: make([]int64, 1)}}
}

type cluster struct {
	*devstack.Stack
	tb testing.TB
}

func newCluster(tb testing.TB) cluster {
	s := stacktest.Own(tb, devstack.Options{Brokers: 3, Quick: true, Kafka: devstack.KafkaOptions{Props: map[string]string{"broker.session.timeout.ms": "6000"}}})
	return cluster{s, tb}
}

func (k cluster) newClient(tb testing.TB) *Client { return newClient(tb, k.Brokers()...) }

func (k cluster) killBroker(tb testing.TB, id int) {
	tb.Helper()
	if err := k.Kafkas()[id-1].Kill(); err != nil {
		tb.Fatal(err)
	}
}

func (k cluster) startBroker(tb testing.TB, id int) {
	tb.Helper()
	if err := k.Kafkas()[id-1].Start(); err != nil {
		tb.Fatal(err)
	}
}

// placeTopic creates a topic with these replicas. Kafka creates only topics with equal replication factors, so placeTopic then
// reassigns partitions.
func (k cluster) placeTopic(tb testing.TB, minISR string, replicas [][]int) string {
	tb.Helper()
	ctx, c, name := ctxOf(tb, 2*time.Minute), k.newClient(tb), stacktest.Name(tb)
	full := [][]int{{1, 2, 3}, {2, 3, 1}, {3, 1, 2}}
	var place []kafka.ReplicaAssignment
	var shrink []kafka.AlterPartitionReassignmentsRequestAssignment
	for p, r := range replicas {
		if len(r) < 3 {
			shrink = append(shrink, kafka.AlterPartitionReassignmentsRequestAssignment{Topic: name, PartitionID: p, BrokerIDs: r})
			r = full[r[0]-1]
		}
		place = append(place, kafka.ReplicaAssignment{Partition: p, Replicas: r})
	}

	stacktest.Eventually(tb, "creation of "+name, func() bool {
		r, err := adminOf(c).CreateTopics(ctx, &kafka.CreateTopicsRequest{Topics: []kafka.TopicConfig{{
			Topic: name, NumPartitions: -1, ReplicationFactor: -1, ReplicaAssignments: place,
			ConfigEntries: []kafka.ConfigEntry{{ConfigName: "min.insync.replicas", ConfigValue: minISR}},
		}}})
		return err == nil && (r.Errors[name] == nil || errors.Is(r.Errors[name], kafka.TopicAlreadyExists))
	})

	waitReady(tb, c, name, len(replicas))
	if len(shrink) > 0 {
		r, err := adminOf(c).AlterPartitionReassignments(ctx, &kafka.AlterPartitionReassignmentsRequest{Assignments: shrink, Timeout: 5 * time.Second})
		if err != nil || r.Error != nil {
			tb.Fatal(err, r)
		}
	}

	stacktest.Eventually(tb, "placement of "+name, func() bool {
		h, err := c.Health(ctx, []string{name})
		if err != nil {
			return false
		}
		for i, p := range h.layout.Topics[name].Partitions {
			if p.Replicas != len(replicas[i]) || p.ISR != p.Replicas || h.Reason(at(name, i)) != healthy {
				return false
			}
		}
		return true
	})

	refreshLayout(ctx, c)
	return name
}

// waitSick waits until the metadata show n sick partitions of parts.
func (k cluster) waitSick(tb testing.TB, c *Client, parts []record.TopicPartition, n int) {
	tb.Helper()
	ctx := ctxOf(tb, 2*time.Minute)
	var topics []string
	for _, tp := range parts {
		topics = append(topics, tp.Topic)
	}
	slices.Sort(topics)
	topics = slices.Compact(topics)
	stacktest.Eventually(tb, "sick partitions", func() bool {
		h, err := c.Health(ctx, topics)
		return err == nil && len(h.Healthy(parts)) == len(parts)-n
	})
}

// sendFrozen sends a zombie's frozen batch until the broker decides about it. taken reports whether the broker appended it.
func sendFrozen(tb testing.TB, c *Client, tp record.TopicPartition, b []byte) (taken <-chan bool) {
	out := make(chan bool, 1)
	// In this time, a broker that was killed starts again.
	ctx := ctxOf(tb, 5*time.Minute)
	go func() {
		for ctx.Err() == nil {
			if code, _ := sendOnce(ctx, c, tp, b); code == 0 || code == int(kafka.InvalidProducerEpoch) {
				out <- code == 0
				return
			}
			refreshLayout(ctx, c)
			pause(ctx, 50*time.Millisecond)
		}
		close(out)
	}()

	return out
}

// startFlow sends numbered batches to a partition until stop, or until the sender is fenced. Only a deposed sender may be fenced.
func startFlow(tb testing.TB, c *Client, tp record.TopicPartition, id Producer, name string, deposed bool) (stop func() []string) {
	ctx, cancel := context.WithCancel(tb.Context())
	var sent []string
	var wg sync.WaitGroup
	wg.Go(func() {
		for ctx.Err() == nil {
			b := encodeBatch(0, id, int32(len(sent)), newRecords(newNames(name, len(sent)+1)[len(sent)])...)
			for {
				code, _ := sendOnce(tb.Context(), c, tp, b)
				if code == 0 {
					break
				}
				if code == int(kafka.InvalidProducerEpoch) && deposed {
					return
				}
				if code != -99 && !kafka.Error(code).Temporary() || tb.Context().Err() != nil {
					tb.Errorf("flow to %s: %v", formatPartition(tp), kafka.Error(code))
					return
				}
				refreshLayout(tb.Context(), c)
				pause(tb.Context(), 50*time.Millisecond)
			}
			sent = newNames(name, len(sent)+1)
			pause(ctx, 40*time.Millisecond)
		}
	})

	stop = sync.OnceValue(func() []string { cancel(); wg.Wait(); return sent })
	tb.Cleanup(func() { stop() })
	return stop
}

// retryAll runs the quarantine loop until it is empty.
func retryAll(tb testing.TB, s *Session) map[record.TopicPartition]*Tail {
	tb.Helper()
	ctx, released := ctxOf(tb, 2*time.Minute), map[record.TopicPartition]*Tail{}
	defer func() {
		if left := s.Quarantined(); len(left) > 0 {
			tb.Logf("still quarantined: %v", left)
		}
	}()

	stacktest.Eventually(tb, "release of the quarantine", func() bool {
		got, err := s.Retry(ctx)
		if err != nil {
			tb.Fatalf("retry: %v", err)
		}
		maps.Copy(released, got)
		return len(s.Quarantined()) == 0
	})

	return released
}

// listQuarantined returns the indices in parts of the partitions in quarantine.
func listQuarantined(o *Out, parts []record.TopicPartition) []int {
	var out []int
	for tp := range o.Quarantined {
		out = append(out, slices.Index(parts, tp))
	}
	slices.Sort(out)
	return out
}

// TestN04_SickPartitions kills a broker of a separate cluster and starts it again, once for three cases with their own
// topics and ids. Each case has one part for the time without the broker, and one for the time after it.
func TestN04_SickPartitions(t *testing.T) {
	t.Parallel()
	k := newCluster(t)
	var away, back []func()
	for _, begin := range []func(*testing.T, cluster) (away, back func()){sickAtKeepAlive, hungAtTakeOver, sickAtTakeOver} {
		a, b := begin(t, k)
		away, back = append(away, a), append(back, b)
	}

	k.killBroker(t, 3)
	for _, do := range away {
		do()
	}

	k.startBroker(t, 3)
	// The last case has a zombie that sends all the time, so it comes first.
	for _, do := range slices.Backward(back) {
		do()
	}
}

// Leaderless and under-ISR partitions during a takeover and at recovery, each with a zombie's frozen batch waiting for it.
func sickAtTakeOver(t *testing.T, k cluster) (away, back func()) {
	old, c := k.newClient(t), k.newClient(t)
	parts := k.newPartitions(t)
	o := ownerOf(t, parts)
	zombie := o.takeAll(t, old).Producer
	for p := range 4 {
		mustSend(t, old, parts[p], encodeBatch(0, zombie, 0, newRecords("a")...))
	}

	var out *Out
	var stops []func() []string
	taken := map[int]<-chan bool{}
	away = func() {
		k.waitSick(t, c, parts, 2)
		begin := time.Now()
		out = o.take(t, c)
		t.Logf("takeover with two sick partitions: %s, %v", time.Since(begin).Round(time.Millisecond), out.Quarantined)
		if got := listQuarantined(out, parts); !slices.Equal(got, []int{2, 3}) {
			t.Fatalf("quarantined %v, want 2 and 3", out.Quarantined)
		}
		if len(o.senders[0].Open) != 2 || !slices.Contains(o.senders[0].Open, parts[2]) || !slices.Contains(o.senders[0].Open, parts[3]) {
			t.Errorf("senders %+v", o.senders)
		}
		for p := range 2 {
			checkZombieRejected(t, old, parts[p], zombie, 1)
			stops = append(stops, startFlow(t, c, parts[p], out.Producer, "flow", false))
		}
		// While they are sick, nothing is released and no transaction is begun there.
		if got, err := out.Session.Retry(ctxOf(t, 2*time.Minute)); err != nil || len(got) > 0 {
			t.Errorf("retry while sick: %v, %v", got, err)
		}
		for p := 2; p < 4; p++ {
			taken[p] = sendFrozen(t, k.newClient(t), parts[p], encodeBatch(0, zombie, 1, newRecords("frozen")...))
		}
	}

	back = func() {
		released := retryAll(t, out.Session)
		o.save(out.Session)
		for p := 2; p < 4; p++ {
			_, a := released[parts[p]].Hits.Take(mustIdentify(t, newHeader("id", "a")), AnyTime)
			_, frozen := released[parts[p]].Hits.Take(mustIdentify(t, newHeader("id", "frozen")), AnyTime)
			if got := <-taken[p]; got != frozen || !a {
				t.Errorf("p%d: the frozen batch was taken %t, read back %t; a was read back %t", p, got, frozen, a)
			}
			checkZombieRejected(t, old, parts[p], zombie, 2)
			mustSend(t, c, parts[p], encodeBatch(0, out.Producer, 0, newRecords("n")...))
		}
		for p, stop := range stops {
			if len(stop()) == 0 {
				t.Errorf("nothing flowed to p%d", p)
			}
		}
		if len(o.senders[0].Open) != 0 {
			t.Errorf("senders %+v", o.senders)
		}
		if err := out.Session.KeepAlive(ctxOf(t, 2*time.Minute), parts, nil); err != nil {
			t.Errorf("keep-alive after recovery: %v", err)
		}
		k.waitSick(t, c, parts, 0)
	}

	return away, back
}

// A live owner's transaction hangs on a partition that the metadata called healthy a moment too long: it moves itself to the
// next generation, and the next owner does not depend on the id that hangs.
func sickAtKeepAlive(t *testing.T, k cluster) (away, back func()) {
	ow, nw := k.newClient(t), k.newClient(t)
	parts := k.newPartitions(t)
	o := ownerOf(t, parts)
	out := o.takeAll(t, ow)
	first := out.Producer
	var next *Out
	var second Producer
	away = func() {
		k.waitSick(t, ow, parts, 2)
		stop := startFlow(t, ow, parts[0], first, "one", false)
		// Healthy partitions only, the sick ones are left alone: the id is not harmed.
		if err := out.Session.KeepAlive(ctxOf(t, 2*time.Minute), parts, nil); err != nil {
			t.Fatalf("keep-alive next to sick partitions: %v", err)
		}
		ctx := ctxOf(t, 2*time.Minute)
		if _, added, err := ow.Barrier(ctx, out.Session.TransactionalID(), first, []record.TopicPartition{parts[3]}, Patience{}); !added {
			t.Fatalf("barrier over the partition under min ISR: %v", err)
		}
		out.Session.in.Own = 0 // the default
		begin := time.Now()
		err := out.Session.KeepAlive(ctx, []record.TopicPartition{parts[1]}, nil)
		if !errors.Is(err, ErrSelfMove) || time.Since(begin) < ownTotal {
			t.Fatalf("keep-alive with a hanging transaction: %v after %s", err, time.Since(begin))
		}
		sent := stop() // drained
		second, err = out.Session.NextGeneration(ctx, settledWith([]record.TopicPartition{parts[2]}, map[string][]int64{parts[0].Topic: {int64(len(sent)) + 10, 10, 10}, parts[2].Topic: {0}}))
		if err != nil {
			t.Fatal(err)
		}
		o.save(out.Session)
		startFlow(t, ow, parts[0], second, "two", true)
		// Another owner takes over while the partitions are still sick. The ids of the new generation fence
		// the drained senders.
		next = o.take(t, nw)
		if next.Session.Generation() != 1 || !slices.Equal(listQuarantined(next, parts), []int{2, 3}) {
			t.Fatalf("successor: generation %d, quarantined %v", next.Session.Generation(), next.Quarantined)
		}
		if n, want := next.Released[parts[0]].Hits.Len(), len(sent); n < want {
			t.Errorf("%d hits in p0, want the %d of the first generation and more", n, want)
		}
		checkZombieRejected(t, ow, parts[0], second, 1_000_000)
		checkZombieRejected(t, ow, parts[1], second, 0)
	}

	back = func() {
		retryAll(t, next.Session)
		o.save(next.Session)
		for p := 2; p < 4; p++ {
			checkZombieRejected(t, ow, parts[p], second, 0)
		}
		checkZombieRejected(t, ow, parts[2], first, 0)
		for _, s := range o.senders {
			if len(s.Open) > 0 {
				t.Errorf("still open: %+v", o.senders)
			}
		}
		k.waitSick(t, nw, parts, 0)
	}

	return away, back
}

// The id hangs before the takeover begins: nothing can be fenced, everything waits, and is released when the id is free.
func hungAtTakeOver(t *testing.T, k cluster) (away, back func()) {
	ow, nw := k.newClient(t), k.newClient(t)
	parts := k.newPartitions(t)
	o := ownerOf(t, parts)
	out := o.takeAll(t, ow)
	zombie := out.Producer
	for p := range 4 {
		mustSend(t, ow, parts[p], encodeBatch(0, zombie, 0, newRecords("a")...))
	}

	var next *Out
	away = func() {
		k.waitSick(t, ow, parts, 2)
		if _, added, err := ow.Barrier(ctxOf(t, 2*time.Minute), o.id+"#0", zombie, []record.TopicPartition{parts[3]}, Patience{}); !added {
			t.Fatalf("barrier over the partition under min ISR: %v", err)
		}
		next = o.take(t, nw, func(in *In) { in.Stuck = 2 * time.Second })
		if next.Session.Generation() != 1 || len(next.Released) != 0 || len(next.Quarantined) != 4 || next.Producer.ID == zombie.ID {
			t.Fatalf("generation %d, released %v, quarantined %v", next.Session.Generation(), next.Released, next.Quarantined)
		}
		hung := o.events[slices.IndexFunc(o.events, func(e Event) bool { return e.Kind == Hung })].Text
		if !strings.Contains(hung, o.id+"#0") || !strings.Contains(hung, formatPartition(parts[3])) || strings.Contains(hung, formatPartition(parts[1])) {
			t.Errorf("the alarm is %q", hung)
		}
		// The alarm is right: the zombie can still write.
		mustSend(t, ow, parts[0], encodeBatch(0, zombie, 1, newRecords("zombie")...))
		if got, err := next.Session.Retry(ctxOf(t, 2*time.Minute)); err != nil || len(got) > 0 {
			t.Errorf("retry while the id hangs: %v, %v", got, err)
		}
	}

	back = func() {
		released := retryAll(t, next.Session)
		o.save(next.Session)
		for p := range 4 {
			if want := []int{2, 1, 1, 1}[p]; released[parts[p]].Hits.Len() != want {
				t.Errorf("p%d: %d hits, want %d", p, released[parts[p]].Hits.Len(), want)
			}
			checkZombieRejected(t, ow, parts[p], zombie, 2)
			mustSend(t, nw, parts[p], encodeBatch(0, next.Producer, 0, newRecords("n")...))
		}
	}

	return away, back
}
