package kafka

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"strconv"
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
	d.r.parkUnwritable(time.Now().Add(2 * time.Hour)) // not before all of it is queued
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

// layout makes the metadata say that a has so many partitions, and whether the first of them has no leader.
func (k *sick) layout(is func() (partitions int, leaderless bool)) {
	host, port, _ := net.SplitHostPort(k.brokers[0])
	n, _ := strconv.Atoi(port)
	k.ControlKey(int16(kmsg.Metadata), func(req kmsg.Request) (kmsg.Response, error, bool) {
		k.KeepControl()
		res := req.ResponseKind().(*kmsg.MetadataResponse)
		res.Brokers = []kmsg.MetadataResponseBroker{{NodeID: 0, Host: host, Port: int32(n)}}
		count, leaderless := is()
		for _, asked := range req.(*kmsg.MetadataRequest).Topics {
			name := *asked.Topic
			topic := kmsg.MetadataResponseTopic{Topic: kmsg.StringPtr(name)}
			for p := range count {
				part := kmsg.MetadataResponseTopicPartition{Partition: int32(p), Replicas: []int32{0}, ISR: []int32{0}}
				if leaderless && name == "a" && p == 0 {
					part.Leader, part.ErrorCode = -1, kerr.LeaderNotAvailable.Code
				}
				topic.Partitions = append(topic.Partitions, part)
				if name == "b" {
					break
				}
			}
			res.Topics = append(res.Topics, topic)
		}
		return res, nil, true
	})
}

func (d *desk) sequence(topic string, from, to int) {
	d.tb.Helper()
	for i := from; i < to; i++ {
		_, _ = d.send(rec(topic, "k", fmt.Sprintf("k/%d", i)))
	}
	d.r.Flush()
}

// TestN11_ABatchThatMayStandIsReadByTheNextSink: the head's fate is unknown when its partition is parked. The sink ends, and
// whether it was appended or not, each of its records stands in the topic once, and is acked where it stands.
func TestN11_ABatchThatMayStandIsReadByTheNextSink(t *testing.T) {
	t.Parallel()
	for name, lose := range map[string]func(k *sick){
		"appended": func(k *sick) {
			k.Fault(kfake.Fault{Keys: []kmsg.Key{kmsg.Produce}, Topic: "a", Err: kerr.NotEnoughReplicasAfterAppend, Count: 1})
		},
		"not appended": func(k *sick) {
			k.ControlKey(int16(kmsg.Produce), func(kmsg.Request) (kmsg.Response, error, bool) {
				return nil, errors.New("the connection is closed"), true
			})
		},
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
				if err := d.r.end(t); !errors.Is(err, ErrReopen) {
					t.Fatalf("the sink ended with %v", err)
				}
				if n := d.count(); n != 10 {
					t.Fatalf("%d are given back, want 10", n)
				}
				k.on.Store(false)
				d.follow()
				d.release()
				d.sequence("a", 15, 20)
				d.answered(20)
				log := read(t, k.brokers, "a")
				inOrder(t, log, 1, 20)
				for i, g := range log[0] {
					at, ok := d.r.acks.acked[record.Ticket(i)]
					if !ok {
						at = d.r.acks.acked[record.Ticket(i)|record.Side]
					}
					if g.Offset != at.off {
						t.Errorf("%s stands at %d and was acked at %d", g.Value, g.Offset, at.off)
					}
				}
			})
		}
	}
}

// TestN11_ASickPartitionEndsATermRarely: until the next end is due it waits alone, and nothing is sent to it.
func TestN11_ASickPartitionEndsATermRarely(t *testing.T) {
	t.Parallel()
	k := newSick(t)
	d := sit(t, onFake(k.brokers...))
	if !d.r.client.mayReopen(time.Now()) {
		t.Fatal("the first end is not allowed")
	}
	d.sequence("a", 0, 5)
	d.answered(5)
	k.Fault(kfake.Fault{Keys: []kmsg.Key{kmsg.Produce}, Topic: "a", Err: kerr.NotEnoughReplicasAfterAppend, Count: 1})
	k.forbid()
	d.sequence("a", 5, 15)
	d.until("the partition is parked", func() bool { return len(d.held) == 10 })
	k.on.Store(false)
	d.sequence("a", 15, 20)
	if err := d.offer(rec("a", "other", "other/0"), 100); !errors.Is(err, record.ErrParked) {
		t.Fatalf("a batch that may stand is passed: %v", err)
	}
	if err := d.offer(rec("a", "k", "k/5"), 5|record.Side); !errors.Is(err, record.ErrParked) {
		t.Fatalf("a delivery passes the batch: %v", err)
	}
	d.r.parkUnwritable(time.Now().Add(reopenEvery / 2))
	d.sequence("b", 0, 5)
	d.answered(10)
	if n, parked := d.parked("a", 0); n != 16 || !parked { // one of them was tried above
		t.Errorf("%d wait, parked %t", n, parked)
	}
	d.r.refreshIdleOffsets(t.Context())
	if at, moved := d.r.acks.idle[record.TopicPartition{Topic: "a"}]; moved {
		t.Errorf("the stored offset moved to %d, past what may stand", at)
	}
	d.r.parkUnwritable(time.Now().Add(2 * reopenEvery))
	if err := d.r.end(t); !errors.Is(err, ErrReopen) {
		t.Fatalf("the sink ended with %v", err)
	}
	d.follow()
	d.release()
	d.answered(25)
	inOrder(t, read(t, k.brokers, "a"), 1, 20)
}

// TestN11_OneRecordAsksForARefusedPartition: what was certainly not appended is given back without ending anything; then a
// record at a time asks, until one is taken.
func TestN11_OneRecordAsksForARefusedPartition(t *testing.T) {
	t.Parallel()
	k := newSick(t)
	d := sit(t, onFake(k.brokers...))
	d.sequence("a", 0, 5)
	d.answered(5)
	k.forbid()
	d.sequence("a", 5, 15)
	d.until("the partition is parked", func() bool { return len(d.held) == 10 })
	asked := func() bool {
		d.try()
		d.mu.Lock()
		defer d.mu.Unlock()
		return len(d.calls) > 2
	}
	until(t, "it was asked for twice", asked)
	for i, list := range d.calls[1:] {
		if len(list) != 1 {
			t.Errorf("call %d gave %d records back, want the one that asks", i, len(list))
		}
	}
	if len(d.ready) != 0 {
		t.Fatal("the partition is ready")
	}
	k.on.Store(false)
	until(t, "the partition is ready", func() bool {
		d.try()
		d.mu.Lock()
		defer d.mu.Unlock()
		return len(d.ready) == 1
	})
	d.sequence("a", 15, 20)
	d.release()
	d.answered(20)
	inOrder(t, read(t, k.brokers, "a"), 1, 20)
}

// TestN11_AMovedLeaderMayHaveTheBatch: Kafka answers NOT_LEADER_OR_FOLLOWER for a batch that it has appended, when its leader
// moves while the batch waits for followers. The partition then has no leader, and is parked. When it is back, the batch stands
// there once, and another event does not get its sequence.
func TestN11_AMovedLeaderMayHaveTheBatch(t *testing.T) {
	t.Parallel()
	k := newSick(t)
	var moved, leaderless atomic.Bool
	u := onFake(k.brokers...)
	u.cfg.ParkAfter = 500 * time.Millisecond
	u.cfg.Dial = func(ctx context.Context, network, addr string) (net.Conn, error) {
		c, err := (&net.Dialer{}).DialContext(ctx, network, addr)
		return movedConn{c, &moved}, err
	}
	k.layout(func() (int, bool) { return 1, leaderless.Load() })
	d := sit(t, u)
	d.sequence("a", 0, 1)
	d.answered(1)
	k.Fault(kfake.Fault{Keys: []kmsg.Key{kmsg.Produce}, Topic: "a", Err: kerr.NotEnoughReplicasAfterAppend, Count: 1})
	k.forbid()
	leaderless.Store(true)
	moved.Store(true)
	d.sequence("a", 1, 2)
	d.until("the partition is parked", func() bool { return len(d.held) == 1 })
	if moved.Load() {
		t.Fatal("no answer was changed")
	}
	k.on.Store(false)
	leaderless.Store(false)
	until(t, "the leader is back", func() bool {
		wake(d.r.renewWake)
		d.mu.Lock()
		ready := len(d.ready) > 0
		d.mu.Unlock()
		d.r.mu.Lock()
		defer d.r.mu.Unlock()
		return ready || d.r.Sink.ended != nil
	})
	if d.r.Sink.ended != nil {
		if err := d.r.end(t); !errors.Is(err, ErrReopen) {
			t.Fatalf("the sink ended with %v", err)
		}
		d.follow()
	}
	_, _ = d.send(rec("a", "other", "other/0"))
	d.r.Flush()
	d.answered(2 + d.unresolved())
	d.release()
	d.answered(3)
	if got := values(read(t, k.brokers, "a"))[0]; !slices.Equal(got, []string{"k/0", "k/1", "other/0"}) {
		t.Errorf("the log is %v, want each event once", got)
	}
}

// unresolved is 1 if the record that was given back was found to stand in the topic.
func (d *desk) unresolved() int { return 1 - d.count() }

// movedConn makes one NOT_ENOUGH_REPLICAS_AFTER_APPEND of partition 0 a NOT_LEADER_OR_FOLLOWER.
type movedConn struct {
	net.Conn
	on *atomic.Bool
}

func (c movedConn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	if c.on.Load() {
		if i := bytes.Index(p[:n], []byte{0, 0, 0, 0, 0, byte(kerr.NotEnoughReplicasAfterAppend.Code)}); i >= 0 {
			p[i+5] = byte(kerr.NotLeaderForPartition.Code)
			c.on.Store(false)
		}
	}
	return n, err
}

// TestN11_WhatIsPutOffIsParkedBeforeTheOthersStop: brokers put off three partitions, none of which holds much. They are parked
// as soon as the memory or the window is nearly full and they hold its low end, and not before.
func TestN11_WhatIsPutOffIsParkedBeforeTheOthersStop(t *testing.T) {
	t.Parallel()
	kc, brokers := fake(t, kfake.NumBrokers(1), kfake.SeedTopics(3, "a"), kfake.SeedTopics(1, "b"))
	var on atomic.Bool
	on.Store(true)
	kc.Fault(kfake.Fault{Keys: []kmsg.Key{kmsg.Produce}, Topic: "a", Err: kerr.NotEnoughReplicas, Count: -1, When: func(kmsg.Request) bool { return on.Load() }})
	d := sit(t, onFake(brokers...))
	low, full := record.Ticket(1_000_000), false
	d.mu.Lock()
	d.pressed = func() (record.Ticket, bool, bool) { return low, full, false }
	d.mu.Unlock()
	for i := range 30 {
		_, _ = d.send(rec("a", fmt.Sprint("k", i%6), fmt.Sprintf("k%d/%d", i%6, i/6)))
	}
	d.sequence("b", 0, 5)
	d.r.acks.until(patient, "the other topic flows", func() bool { return len(d.r.acks.acked) == 5 })
	look := func() int {
		d.r.parkUnwritable(time.Now().Add(time.Second))
		return d.count()
	}
	if look() != 0 {
		t.Fatal("parked although there is room")
	}
	d.mu.Lock()
	full = true
	d.mu.Unlock()
	if look() != 0 {
		t.Fatal("parked although another event is the first")
	}
	d.mu.Lock()
	low = 0
	d.mu.Unlock()
	until(t, "all three are parked", func() bool { return look() == 30 }) // one may be in flight
	on.Store(false)
	until(t, "all of it is released", func() bool { d.try(); return d.count() == 0 })
	d.answered(35)
	inOrder(t, read(t, brokers, "a"), 6, 5)
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
		l.interruptLocked()
	}
	d.r.mu.Unlock()
	d.sequence("a", 1, 50)
	p := d.r.topics["a"].partitions[0]
	var tries int
	until(t, "it is tried for longer than ParkAfter", func() bool {
		d.r.mu.Lock()
		defer d.r.mu.Unlock()
		tries = max(tries, p.tries)
		return p.obstacle.kind == kindUnreachable && time.Since(p.since) > 400*time.Millisecond && p.tries > 5
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
	p, hits := d.r.hold(topic)
	if hits.Len() != 10 {
		t.Fatalf("%d hits, want 10", hits.Len())
	}
	d.sequence(topic, 0, before)
	if before == during {
		d.r.EndReplay()
	}
	until(t, "the time is over", func() bool { d.r.parkUnwritable(time.Now()); return d.count() == before })
	d.sequence(topic, before, during)
	d.r.EndReplay()
	d.sequence(topic, 12, 14)
	if d.count() != 14 {
		t.Fatalf("%d are held, want 14", d.count())
	}
	d.r.run(t)
	until(t, "the partition has a leader", func() bool {
		wake(d.r.renewWake)
		d.r.mu.Lock()
		defer d.r.mu.Unlock()
		return p.lane != nil
	})
	tp := record.TopicPartition{Topic: topic}
	if err := d.r.admitTails(t.Context(), map[record.TopicPartition]*fence.Tail{tp: {From: 0, Next: p.ackedEnd, Hits: hits}}); err != nil {
		t.Fatal(err)
	}
	d.until("the partition is ready, its offset held", func() bool { return len(d.ready) == 1 && len(d.found) == 1 })
	d.release()
	d.answered(14)
	inOrder(t, read(t, stacktest.Brokers(t), topic), 1, 14)
	for i := range 10 {
		if at := d.r.acks.acked[record.Ticket(i)|record.Side]; at.off >= p.ackedEnd {
			t.Errorf("k/%d was acked at %d", i, at.off)
		}
	}
}

// endNow ends a sink that does not run.
func (r *rig) endNow(t *testing.T) error {
	r.run(t)
	return r.kill()
}

// TestN11_AGrowingTopicParksWithItsPartition: what waits for the new partitions stands behind what was given back.
func TestN11_AGrowingTopicParksWithItsPartition(t *testing.T) {
	t.Parallel()
	u := setUp{noRun: true}
	d := sit(t, u)
	d.r.mu.Lock()
	top := d.r.findOrAddTopicLocked("t")
	top.addPartitions(1)
	d.r.mu.Unlock()
	d.sequence("t", 0, 3)
	d.r.applyLayout(&Layout{Topics: map[string]TopicLayout{"t": {Partitions: []PartitionLayout{{Leader: -1}, {Leader: -1}}}}})
	d.sequence("t", 3, 6)
	if n := d.count(); n != 0 {
		t.Fatalf("%d are held at once", n)
	}
	d.r.parkUnwritable(time.Now().Add(time.Second))
	if got := d.given(); !slices.Equal(got, []record.Ticket{0, 1, 2, 3, 4, 5}) {
		t.Fatalf("given back: %v", got)
	}
	for partition, want := range map[int32]int{-1: 3, 0: 3} {
		if n, ok := d.parked("t", partition); n != want || !ok {
			t.Errorf("partition %d: %d wait, parked %t", partition, n, ok)
		}
	}
	if names := d.r.topicsToAdopt(); !slices.Equal(names, []string{"t"}) {
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
		wake(d.r.renewWake)
		d.r.mu.Lock()
		defer d.r.mu.Unlock()
		return d.r.topics[topic].partitions[0].parked && d.r.topics[topic].partitions[1].parked
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

// TestN11_AGrownTopicFlowsBesideALeaderlessPartition: an old partition has no leader, and a batch that may stand in it. The
// new partitions are used all the same, but not for what may stand in the old one.
func TestN11_AGrownTopicFlowsBesideALeaderlessPartition(t *testing.T) {
	t.Parallel()
	kc, brokers := fake(t, kfake.NumBrokers(1), kfake.SeedTopics(4, "a"), kfake.SeedTopics(1, "b"))
	k := &sick{Cluster: kc, brokers: brokers}
	var partitions atomic.Int32
	var leaderless atomic.Bool
	partitions.Store(2)
	k.layout(func() (int, bool) { return int(partitions.Load()), leaderless.Load() })
	d := sit(t, onFake(brokers...))
	const keys = 12
	round := func(n int) {
		for i := range keys {
			_, _ = d.send(rec("a", fmt.Sprint("k", i), fmt.Sprintf("k%d/%d", i, n)))
		}
		d.r.Flush()
	}
	round(0)
	d.answered(keys)
	k.Fault(kfake.Fault{Keys: []kmsg.Key{kmsg.Produce}, Topic: "a", Partitions: []int32{0}, Err: kerr.NotEnoughReplicasAfterAppend, Count: 1})
	k.Fault(kfake.Fault{Keys: []kmsg.Key{kmsg.Produce}, Topic: "a", Partitions: []int32{0}, Err: kerr.NotEnoughReplicas, Count: -1, When: func(kmsg.Request) bool { return k.on.Load() }})
	k.on.Store(true)
	round(1)
	head := func() *partition { return d.r.topics["a"].partitions[0] }
	until(t, "the batch may stand", func() bool {
		d.r.mu.Lock()
		defer d.r.mu.Unlock()
		return len(head().queue) > 0 && head().queue[0].maybeAppended
	})
	leaderless.Store(true)
	wake(d.r.renewWake)
	d.until("the partition is parked", func() bool { return len(d.held) > 0 })
	old := d.count()
	partitions.Store(4)
	until(t, "the new partitions are adopted", func() bool {
		wake(d.r.renewWake)
		d.r.mu.Lock()
		defer d.r.mu.Unlock()
		top := d.r.topics["a"]
		return len(top.partitions) == 4 && top.isReady() && !top.parked
	})
	d.try() // nothing of the old partition goes to a new one
	if n := d.count(); n != old {
		t.Errorf("%d of %d records of the old partition were sent elsewhere", old-n, old)
	}
	round(2)
	acked := 3*keys - old*2
	d.r.acks.until(patient, "the other keys flow", func() bool { return len(d.r.acks.acked) == acked })
	k.on.Store(false)
	leaderless.Store(false)
	wake(d.r.renewWake)
	if err := d.r.end(t); !errors.Is(err, ErrReopen) {
		t.Fatalf("the sink ended with %v", err)
	}
	d.follow()
	d.release()
	d.answered(3 * keys)
	log := read(t, brokers, "a")
	inOrder(t, log, keys, 3)
}
