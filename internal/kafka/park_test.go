package kafka

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/segmentio/kafka-go"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/outrelay/outrelay/internal/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/kafka/fence"
	"github.com/outrelay/outrelay/internal/record"
)

func TestN11_MissingTopicIsParkedAndFollowsInOrder(t *testing.T) {
	t.Parallel()
	there, missing := stacktest.Topic(t, 1), stacktest.Name(t)
	d := sit(t, setUp{cfg: Config{ParkAfter: time.Hour}})
	both := func(from, to int) {
		for i := from; i < to; i++ {
			if _, err := d.send(rec(there, "k", fmt.Sprintf("k/%d", i))); err != nil {
				t.Fatalf("the healthy topic: %v", err)
			}
			_, _ = d.send(rec(missing, fmt.Sprint("k", i%3), fmt.Sprintf("k%d/%d", i%3, i/3)))
		}
		d.r.Flush()
	}
	both(0, 30)
	until(t, "the topic is found missing", func() bool {
		return slices.ContainsFunc(d.r.State(), func(b Blocked) bool { return b.Topic == missing && b.Kind == kindMissing })
	})
	d.r.parkAll(time.Now().Add(2 * time.Hour)) // not before all of it is queued
	d.until("the missing topic is parked", func() bool { return len(d.held) == 30 })
	if err := d.r.Drain(t.Context()); err != nil { // what was given back is resolved
		t.Fatal(err)
	}
	if got := d.given(); !slices.IsSorted(got) || len(got) != 30 || len(d.calls) != 1 {
		t.Fatalf("given back in %d calls: %v", len(d.calls), got)
	}
	both(30, 60)
	if n, ok := d.parked(missing, -1); n != 60 || !ok || d.count() != 60 {
		t.Fatalf("%d wait for the topic, parked %t; %d are held", n, ok, d.count())
	}
	x := rec(missing, "new", "new")
	if err := d.offer(x, 1000); !errors.Is(err, record.ErrParked) {
		t.Fatalf("a new key: %v", err)
	}
	if err := d.offer(x, 1000|record.Side); !errors.Is(err, record.ErrParked) {
		t.Fatalf("outside of the stream's order: %v", err)
	}
	d.answered(60) // all of the healthy topic, and no byte is lost
	stacktest.CreateTopic(t, missing, 2)
	d.until("the topic is ready, with nothing waiting in it", func() bool { return slices.Contains(d.ready, missing) })
	d.release()
	both(60, 90)
	d.answered(180)
	inOrder(t, read(t, stacktest.Brokers(t), missing), 3, 30)
	inOrder(t, read(t, stacktest.Brokers(t), there), 1, 90)
	if left := d.r.State(); len(left) != 0 {
		t.Fatalf("still blocked: %+v", left)
	}
}

// sick is a cluster of one broker with topics a and b, of which a can be made to answer that it is forbidden.
type sick struct {
	*kfake.Cluster
	brokers []string
	on      atomic.Bool
}

func newSick(t *testing.T) *sick {
	kc, brokers := fake(t, kfake.NumBrokers(1), kfake.SeedTopics(1, "a", "b"))
	return &sick{Cluster: kc, brokers: brokers}
}

// forbid makes each produce to a fail from now on, while on is set.
func (k *sick) forbid() {
	k.on.Store(true)
	k.Fault(kfake.Fault{Keys: []kmsg.Key{kmsg.Produce}, Topic: "a", Err: kerr.TopicAuthorizationFailed, Count: -1, When: func(kmsg.Request) bool { return k.on.Load() }})
}

func (d *desk) sequence(topic string, from, to int) {
	d.tb.Helper()
	for i := from; i < to; i++ {
		_, _ = d.send(rec(topic, "k", fmt.Sprintf("k/%d", i)))
	}
	d.r.Flush()
}

// TestN11_AGhostIsNotSentTwice: the head's fate is unknown when its partition is parked. Whether it was appended before, or
// is appended when the partition is well again: its records are found where they stand, and the offset is held until then.
func TestN11_AGhostIsNotSentTwice(t *testing.T) {
	t.Parallel()
	for name, lose := range map[string]func(k *sick){
		"appended before": func(k *sick) {
			k.Fault(kfake.Fault{Keys: []kmsg.Key{kmsg.Produce}, Topic: "a", Err: kerr.NotEnoughReplicasAfterAppend, Count: 1})
		},
		"appended at last": func(k *sick) {
			k.ControlKey(int16(kmsg.Produce), func(kmsg.Request) (kmsg.Response, error, bool) {
				return nil, errors.New("the connection is closed"), true
			})
		},
		"certainly not appended": func(*sick) {},
	} {
		for _, codec := range []string{"none", "gzip"} {
			t.Run(name+" "+codec, func(t *testing.T) {
				t.Parallel()
				k := newSick(t)
				u := onFake(k.brokers...)
				u.cfg.Compression = codec
				d := sit(t, u)
				d.sequence("a", 0, 5)
				d.answered(5)
				lose(k)
				k.forbid()
				d.sequence("a", 5, 15)
				d.until("the partition is parked", func() bool { return len(d.held) == 10 })
				d.sequence("a", 15, 20)
				if err := d.offer(rec("a", "other", "other/0"), 100); !errors.Is(err, record.ErrParked) {
					t.Fatalf("a ghost is passed: %v", err)
				}
				if err := d.offer(rec("a", "k", "k/5"), 5|record.Side); !errors.Is(err, record.ErrParked) {
					t.Fatalf("a delivery passes the ghost: %v", err)
				}
				d.sequence("b", 0, 5)
				d.answered(10)
				if n, parked := d.parked("a", 0); n != 16 || !parked { // one of them was tried above
					t.Errorf("%d wait, parked %t", n, parked)
				}
				k.on.Store(false)
				d.until("the partition is ready", func() bool { return len(d.ready) == 1 })
				if at := d.holds[record.TopicPartition{Topic: "a"}]; at != 5 {
					t.Errorf("held at %d, want the first record of the ghost", at)
				}
				d.release()
				d.sequence("a", 20, 25)
				d.answered(30)
				d.until("the offset is let go", func() bool { return d.let == 1 && len(d.holds) == 0 })
				log := read(t, k.brokers, "a")
				inOrder(t, log, 1, 25)
				for i, list := 0, log[0]; i < 25; i++ {
					id := record.Ticket(i)
					if i >= 20 {
						id += 5 // those of b
					}
					at, ok := d.r.acks.acked[id]
					if !ok {
						at = d.r.acks.acked[id|record.Side]
					}
					if list[i].Offset != at.off {
						t.Errorf("%s stands at %d and was acked at %d", list[i].Value, list[i].Offset, at.off)
					}
				}
			})
		}
	}
}

// TestN11_AGhostThatIsRefusedIsForgotten: its sequence was not used, and what follows takes it.
func TestN11_AGhostThatIsRefusedIsForgotten(t *testing.T) {
	t.Parallel()
	k := newSick(t)
	d := sit(t, onFake(k.brokers...))
	d.sequence("a", 0, 5)
	d.answered(5)
	k.forbid()
	d.sequence("a", 5, 15)
	d.until("the partition is parked", func() bool { return len(d.held) == 10 })
	k.Fault(kfake.Fault{Keys: []kmsg.Key{kmsg.Produce}, Topic: "a", Err: kerr.InvalidRecord, Count: 1, When: func(kmsg.Request) bool { return !k.on.Load() }})
	k.on.Store(false)
	d.until("the partition is ready", func() bool { return len(d.ready) == 1 })
	d.release()
	d.answered(15)
	inOrder(t, read(t, k.brokers, "a"), 1, 15)
	if len(d.holds) != 0 || len(d.calls) != 1 {
		t.Errorf("held %v; given back in %d calls", d.holds, len(d.calls))
	}
}

func TestN11_LoadParksAtOnce(t *testing.T) {
	t.Parallel()
	u := setUp{cfg: Config{ParkAfter: time.Hour, ParkBytes: 40 << 10}}
	d := sit(t, u)
	missing := stacktest.Name(t)
	d.sequence(missing, 0, 1)
	until(t, "the topic is found missing", func() bool {
		return slices.ContainsFunc(d.r.State(), func(b Blocked) bool { return b.Kind == kindMissing && !b.Parked })
	})
	for i := range 20 {
		x := rec(missing, "k", fmt.Sprintf("k/%d", i))
		x.Headers = append(x.Headers, record.Header{Key: []byte("x"), Value: make([]byte, 1000)})
		_, _ = d.send(x)
	}
	d.until("it is parked", func() bool { return len(d.held) > 10 })
}

// TestN11_UnreachableBrokersParkNothing: an outage is waited for.
func TestN11_UnreachableBrokersParkNothing(t *testing.T) {
	t.Parallel()
	_, brokers := fake(t, kfake.NumBrokers(1), kfake.SeedTopics(1, "a"))
	var away atomic.Bool
	u := onFake(brokers...)
	u.cfg.ParkAfter, u.cfg.ParkBytes = 50*time.Millisecond, 400
	u.cfg.Dial = func(ctx context.Context, network, addr string) (net.Conn, error) {
		if away.Load() {
			return nil, errors.New("away")
		}
		return (&net.Dialer{}).DialContext(ctx, network, addr)
	}
	d := sit(t, u)
	d.sequence("a", 0, 1)
	d.answered(1)
	away.Store(true)
	d.r.mu.Lock()
	for _, l := range d.r.lanes {
		l.interrupt()
	}
	d.r.mu.Unlock()
	d.sequence("a", 1, 50)
	p := d.r.topics["a"].parts[0]
	var tries int
	until(t, "it is tried for longer than ParkAfter", func() bool {
		d.r.mu.Lock()
		defer d.r.mu.Unlock()
		tries = max(tries, p.tries)
		return p.why.kind == kindUnreachable && time.Since(p.since) > 400*time.Millisecond && p.tries > 5
	})
	away.Store(false)
	d.answered(50)
	if len(d.calls) != 0 {
		t.Error("records were given back")
	}
	inOrder(t, read(t, brokers, "a"), 1, 50)
}

// TestN11_QuarantineIsParked: what an earlier owner has sent is not known yet when the records are given back, and the
// replay is over when it is, be that before they are given back or after. The deliveries that follow find it, the offset is
// held until they do, so that a successor finds it too (N8), and the rest is sent.
func TestN11_QuarantineIsParked(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct{ before, during int }{
		"before the end of the replay": {4, 12},
		"after the end of the replay":  {12, 12},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			quarantineIsParked(t, c.before, c.during)
		})
	}
}

// quarantineIsParked gives back that many records, sends more during the replay up to another number, and two behind it; where
// both are the same the replay ends first.
func quarantineIsParked(t *testing.T, before, during int) {
	t.Helper()
	first, topic := successor(t, 10)
	if err := first.endNow(t); err != nil {
		t.Fatal(err)
	}
	d := newDesk(t)
	d.r = open(t, setUp{txid: "outrelay.test." + topic, claims: first.claims, noRun: true, holder: d, cfg: Config{ParkAfter: 50 * time.Millisecond}})
	p := d.r.hold(topic)
	d.r.mu.Lock()
	p.undrained = false // as after a take-over: nothing was read
	hits := p.hits
	p.t.hits -= hits.Len()
	p.hits = nil
	d.r.mu.Unlock()
	if hits.Len() != 10 {
		t.Fatalf("%d hits, want 10", hits.Len())
	}
	d.sequence(topic, 0, before)
	if before == during {
		d.r.EndReplay()
	}
	until(t, "the time is over", func() bool { d.r.parkAll(time.Now()); return d.count() == before })
	d.sequence(topic, before, during)
	d.r.EndReplay()
	d.sequence(topic, 12, 14)
	if d.count() != 14 {
		t.Fatalf("%d are held, want 14", d.count())
	}
	d.r.run(t)
	until(t, "the partition has a leader", func() bool {
		wake(d.r.renew)
		d.r.mu.Lock()
		defer d.r.mu.Unlock()
		return p.lane != nil
	})
	tp := record.TopicPartition{Topic: topic}
	if err := d.r.admitTails(t.Context(), map[record.TopicPartition]*fence.Tail{tp: {From: 0, Next: p.end, Hits: hits}}); err != nil {
		t.Fatal(err)
	}
	d.until("the partition is ready, its offset held", func() bool { return len(d.ready) == 1 && len(d.holds) == 1 })
	d.release()
	d.answered(14)
	d.until("the offset is let go", func() bool { return len(d.holds) == 0 })
	inOrder(t, read(t, stacktest.Brokers(t), topic), 1, 14)
	for i := range 10 {
		if at := d.r.acks.acked[record.Ticket(i)|record.Side]; at.off >= p.end {
			t.Errorf("k/%d was acked at %d", i, at.off)
		}
	}
}

// endNow ends a sink that does not run.
func (r *rig) endNow(t *testing.T) error {
	r.run(t)
	return r.kill()
}

// TestN11_ANextGenerationFindsTheGhost: the partition of a ghost goes into quarantine when the generation moves, and what
// the read finds of it is left to the deliveries that follow.
func TestN11_ANextGenerationFindsTheGhost(t *testing.T) {
	t.Parallel()
	for name, e := range map[string]*kerr.Error{"unsure": kerr.NotEnoughReplicasAfterAppend, "certain": kerr.NotEnoughReplicas} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			k := newSick(t)
			d := sit(t, onFake(k.brokers...))
			d.sequence("a", 0, 5)
			d.answered(5)
			k.Fault(kfake.Fault{Keys: []kmsg.Key{kmsg.Produce}, Topic: "a", Err: e, Count: 1})
			k.forbid()
			d.sequence("a", 5, 15)
			d.until("the partition is parked", func() bool { return len(d.held) == 10 })
			ctx, cancel := context.WithTimeout(t.Context(), patient)
			defer cancel()
			d.r.drainLimit = 50 * time.Millisecond
			if err := d.r.move(ctx); err != nil {
				t.Fatal(err)
			}
			k.on.Store(false)
			d.until("the partition is ready", func() bool { return len(d.ready) >= 1 })
			d.release()
			d.sequence("a", 15, 20)
			d.answered(20)
			d.until("nothing is held", func() bool { return len(d.holds) == 0 })
			inOrder(t, read(t, k.brokers, "a"), 1, 20)
		})
	}
}

// TestN11_AGrowingTopicParksWithItsPartition: what waits for the new partitions stands behind what was given back.
func TestN11_AGrowingTopicParksWithItsPartition(t *testing.T) {
	t.Parallel()
	u := setUp{noRun: true}
	d := sit(t, u)
	d.r.mu.Lock()
	top := d.r.topicOf("t")
	top.grow(1)
	d.r.mu.Unlock()
	d.sequence("t", 0, 3)
	d.r.place(&Layout{Topics: map[string]TopicLayout{"t": {Partitions: []PartitionLayout{{Leader: -1}, {Leader: -1}}}}})
	d.sequence("t", 3, 6)
	if n := d.count(); n != 0 {
		t.Fatalf("%d are held at once", n)
	}
	d.r.parkAll(time.Now().Add(time.Second))
	if got := d.given(); !slices.Equal(got, []record.Ticket{0, 1, 2, 3, 4, 5}) {
		t.Fatalf("given back: %v", got)
	}
	for partition, want := range map[int32]int{-1: 3, 0: 3} {
		if n, ok := d.parked("t", partition); n != want || !ok {
			t.Errorf("partition %d: %d wait, parked %t", partition, n, ok)
		}
	}
	if names := d.r.wanted(); !slices.Equal(names, []string{"t"}) {
		t.Errorf("to be adopted: %v", names)
	}
}

// TestN11_ADeletedTopicIsParkedByPartition and follows when it is there again.
func TestN11_ADeletedTopicIsParkedByPartition(t *testing.T) {
	t.Parallel()
	topic := stacktest.Topic(t, 2)
	d := sit(t, setUp{})
	d.sequence(topic, 0, 5)
	d.answered(5)
	cl := admin(t)
	if _, err := cl.DeleteTopics(t.Context(), &kafka.DeleteTopicsRequest{Topics: []string{topic}}); err != nil {
		t.Fatal(err)
	}
	until(t, "its deletion is seen", func() bool {
		wake(d.r.renew)
		d.r.mu.Lock()
		defer d.r.mu.Unlock()
		return d.r.topics[topic].parts[0].parked && d.r.topics[topic].parts[1].parked
	})
	if state := d.r.State(); len(state) != 0 {
		t.Errorf("nothing waits, and the state is %+v", state)
	}
	for i := range 10 {
		if _, err := d.send(rec(topic, fmt.Sprint("k", i%2), fmt.Sprintf("k%d/%d", i%2, i/2))); err == nil {
			t.Fatal("a parked partition takes a record")
		}
	}
	stacktest.CreateTopic(t, topic, 2)
	d.until("both are ready", func() bool { return len(d.ready) == 2 })
	d.release()
	d.answered(15)
	inOrder(t, read(t, stacktest.Brokers(t), topic), 2, 5)
}
