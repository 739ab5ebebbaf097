package sink

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/segmentio/kafka-go"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/outrelay/outrelay/internal/base/retry"
	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
)

// TestN11_MissingTopicIsParkedAndFollowsInOrder: the records of a missing topic are given back, and
// sent in order once the topic exists. A healthy topic flows all the time.
func TestN11_MissingTopicIsParkedAndFollowsInOrder(t *testing.T) {
	t.Parallel()
	there, missing := stacktest.Topic(t, 1), stacktest.Name(t)
	d := openWithHolder(t, sinkOptions{cfg: testConfig{ParkAfter: time.Hour}})
	both := func(from, to int) {
		for i := from; i < to; i++ {
			if _, err := d.send(newRecord(there, "k", fmt.Sprintf("k/%d", i))); err != nil {
				t.Fatalf("the healthy topic: %v", err)
			}
			_, _ = d.send(newRecord(missing, fmt.Sprint("k", i%3), fmt.Sprintf("k%d/%d", i%3, i/3)))
		}
		d.r.Flush()
	}

	both(0, 30)
	stacktest.Eventually(t, "the topic is found missing", func() bool {
		return slices.ContainsFunc(d.r.State(), func(b Unwritable) bool { return b.Topic == missing && b.Kind == kindMissing })
	})

	// All of it is queued by now.
	d.r.parker.parkUnwritable(time.Now().Add(2 * time.Hour))
	d.waitUntil("the missing topic is parked", func() bool { return len(d.held) == 30 })
	d.r.requireDrained(t)
	if got := d.withdrawnTickets(); !slices.IsSorted(got) || len(got) != 30 || len(d.calls) != 1 {
		t.Fatalf("given back in %d calls, want 30 tickets in order in one call: %v", len(d.calls), got)
	}

	both(30, 60)
	if n, ok := d.parkedCount(missing, -1); n != 60 || !ok || d.heldCount() != 60 {
		t.Fatalf("%d wait for the topic, parked %t; %d are held; want 60, true, 60", n, ok, d.heldCount())
	}

	x := newRecord(missing, "new", "new")
	if err := d.sendCounted(x, 1000); !errors.Is(err, record.ErrParked) {
		t.Fatalf("sending a new key: got %v, want ErrParked", err)
	}
	if err := d.sendCounted(x, 1000|record.Side); !errors.Is(err, record.ErrParked) {
		t.Fatalf("sending a side delivery: got %v, want ErrParked", err)
	}

	// All records of the healthy topic, and no reserved memory is lost.
	d.waitResolved(60)
	stacktest.CreateTopic(t, missing, 2)
	d.waitUntil("the topic is ready, with nothing waiting in it", func() bool { return slices.Contains(d.ready, missing) })
	d.release()
	both(60, 90)
	d.waitResolved(180)

	requireInOrder(t, readTopic(t, stacktest.Brokers(t), missing), 3, 30)
	requireInOrder(t, readTopic(t, stacktest.Brokers(t), there), 1, 90)
	if left := d.r.State(); len(left) != 0 {
		t.Fatalf("still blocked: %+v", left)
	}
}

// sickCluster is a cluster of one broker with the topics a and b. Produce requests to a can be made
// to fail.
type sickCluster struct {
	*kfake.Cluster
	brokers []string
	on      atomic.Bool
}

func newSickCluster(t *testing.T) *sickCluster {
	kc, brokers := newFakeCluster(t, kfake.NumBrokers(1), kfake.SeedTopics(1, "a", "b"))
	return &sickCluster{Cluster: kc, brokers: brokers}
}

// forbidWrites makes each produce request to a fail from now on, while on is set.
func (k *sickCluster) forbidWrites() {
	k.on.Store(true)
	k.Fault(kfake.Fault{
		Keys:  []kmsg.Key{kmsg.Produce},
		Topic: "a",
		Err:   kerr.TopicAuthorizationFailed,
		Count: -1,
		When:  func(kmsg.Request) bool { return k.on.Load() },
	})
}

// overrideLayout makes metadata responses report the number of partitions of a, and whether the
// first of them has no leader.
func (k *sickCluster) overrideLayout(current func() (partitions int, leaderless bool)) {
	host, port, _ := net.SplitHostPort(k.brokers[0])
	n, _ := strconv.Atoi(port)

	k.ControlKey(int16(kmsg.Metadata), func(req kmsg.Request) (kmsg.Response, error, bool) {
		k.KeepControl()
		res := req.ResponseKind().(*kmsg.MetadataResponse)
		res.Brokers = []kmsg.MetadataResponseBroker{{NodeID: 0, Host: host, Port: int32(n)}}

		count, leaderless := current()
		for _, requested := range req.(*kmsg.MetadataRequest).Topics {
			name := *requested.Topic
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

// sendSequence sends the records with the numbers from (inclusive) to to (exclusive) of the key k.
// Records that the sink does not take are held.
func (d *testHolder) sendSequence(topic string, from, to int) {
	d.tb.Helper()
	for i := from; i < to; i++ {
		_, _ = d.send(newRecord(topic, "k", fmt.Sprintf("k/%d", i)))
	}
	d.r.Flush()
}

// TestN11_ABatchThatMayStandIsReadByTheNextSink: a partition is parked while it is unknown whether
// its head batch was appended. The sink ends. Whether the batch was appended or not, each of its
// records is in the topic once, and is acked at its offset.
func TestN11_ABatchThatMayStandIsReadByTheNextSink(t *testing.T) {
	t.Parallel()
	for name, lose := range map[string]func(k *sickCluster){
		"appended": func(k *sickCluster) {
			k.Fault(kfake.Fault{Keys: []kmsg.Key{kmsg.Produce}, Topic: "a", Err: kerr.NotEnoughReplicasAfterAppend, Count: 1})
		},
		"not appended": func(k *sickCluster) {
			k.ControlKey(int16(kmsg.Produce), func(kmsg.Request) (kmsg.Response, error, bool) {
				return nil, errors.New("the connection is closed"), true
			})
		},
	} {
		for _, codec := range []string{"none", "gzip"} {
			t.Run(name+" "+codec, func(t *testing.T) {
				t.Parallel()
				k := newSickCluster(t)
				u := fakeOptions(k.brokers...)
				u.cfg.Compression = codec
				d := openWithHolder(t, u)
				d.sendSequence("a", 0, 5)
				d.waitResolved(5)

				lose(k)
				k.forbidWrites()
				d.sendSequence("a", 5, 15)
				if err := d.r.waitEnded(t); !errors.Is(err, ErrReopen) {
					t.Fatalf("the sink ended with %v, want ErrReopen", err)
				}
				if n := d.heldCount(); n != 10 {
					t.Fatalf("%d records are given back, want 10", n)
				}

				k.on.Store(false)
				d.openNext()
				d.release()
				d.sendSequence("a", 15, 20)
				d.waitResolved(20)

				log := readTopic(t, k.brokers, "a")
				requireInOrder(t, log, 1, 20)
				for i, g := range log[0] {
					at, ok := d.r.acks.acked[record.Ticket(i)]
					if !ok {
						at = d.r.acks.acked[record.Ticket(i)|record.Side]
					}
					if g.Offset != at.off {
						t.Errorf("%s was acked at offset %d, but is at %d", g.Value, at.off, g.Offset)
					}
				}
			})
		}
	}
}

// TestN11_ASickPartitionEndsATermRarely: a partition that has to be read back ends the sink at most
// once in reopenEvery. Until then nothing is sent to it, and other partitions flow.
func TestN11_ASickPartitionEndsATermRarely(t *testing.T) {
	t.Parallel()
	k := newSickCluster(t)
	d := openWithHolder(t, fakeOptions(k.brokers...))
	if !d.r.opener.takeReopen(time.Now()) {
		t.Fatal("takeReopen does not allow the first end")
	}

	d.sendSequence("a", 0, 5)
	d.waitResolved(5)

	k.Fault(kfake.Fault{Keys: []kmsg.Key{kmsg.Produce}, Topic: "a", Err: kerr.NotEnoughReplicasAfterAppend, Count: 1})
	k.forbidWrites()
	d.sendSequence("a", 5, 15)
	d.waitUntil("the partition is parked", func() bool { return len(d.held) == 10 })

	k.on.Store(false)
	d.sendSequence("a", 15, 20)
	if err := d.sendCounted(newRecord("a", "other", "other/0"), 100); !errors.Is(err, record.ErrParked) {
		t.Fatalf("another key, after a batch that may be appended: got %v, want ErrParked", err)
	}
	if err := d.sendCounted(newRecord("a", "k", "k/5"), 5|record.Side); !errors.Is(err, record.ErrParked) {
		t.Fatalf("a side delivery, after a batch that may be appended: got %v, want ErrParked", err)
	}

	d.r.parker.parkUnwritable(time.Now().Add(fixedLimits.reopenEvery / 2))
	d.sendSequence("b", 0, 5)
	d.waitResolved(10)
	// The count includes the record with the other key that was sent above.
	if n, parked := d.parkedCount("a", 0); n != 16 || !parked {
		t.Errorf("%d records wait, parked %t, want 16, true", n, parked)
	}

	d.r.refreshIdleOffsets(t.Context(), d.r.refresher.openTopicNames())
	if at, moved := d.r.acks.idle[record.TopicPartition{Topic: "a"}]; moved {
		t.Errorf("the stored offset moved to %d, past a batch that may be appended", at)
	}

	d.r.parker.parkUnwritable(time.Now().Add(2 * fixedLimits.reopenEvery))
	if err := d.r.waitEnded(t); !errors.Is(err, ErrReopen) {
		t.Fatalf("the sink ended with %v, want ErrReopen", err)
	}

	d.openNext()
	d.release()
	d.waitResolved(25)
	requireInOrder(t, readTopic(t, k.brokers, "a"), 1, 20)
}

// TestN11_OneRecordAsksForARejectedPartition: records that were certainly not appended are given
// back, and the sink continues. Then single records probe the partition until one is accepted.
func TestN11_OneRecordAsksForARejectedPartition(t *testing.T) {
	t.Parallel()
	k := newSickCluster(t)
	d := openWithHolder(t, fakeOptions(k.brokers...))
	d.sendSequence("a", 0, 5)
	d.waitResolved(5)
	k.forbidWrites()
	d.sendSequence("a", 5, 15)
	d.waitUntil("the partition is parked", func() bool { return len(d.held) == 10 })

	probedTwice := func() bool {
		d.tryRelease()
		d.mu.Lock()
		defer d.mu.Unlock()
		return len(d.calls) > 2
	}
	stacktest.Eventually(t, "two probes were rejected", probedTwice)
	for i, list := range d.calls[1:] {
		if len(list) != 1 {
			t.Errorf("call %d gave %d records back, want only the probe", i, len(list))
		}
	}
	if len(d.ready) != 0 {
		t.Fatal("the partition is ready although all probes were rejected")
	}

	k.on.Store(false)
	stacktest.Eventually(t, "the partition is ready", func() bool {
		d.tryRelease()
		d.mu.Lock()
		defer d.mu.Unlock()
		return len(d.ready) == 1
	})

	d.sendSequence("a", 15, 20)
	d.release()
	d.waitResolved(20)
	requireInOrder(t, readTopic(t, k.brokers, "a"), 1, 20)
}

// TestN11_AMovedLeaderMayHaveTheBatch: if the leader moves while an appended batch waits for
// followers, Kafka responds with NOT_LEADER_OR_FOLLOWER. The partition then has no leader, and is
// parked. When the leader is back, the batch is in the log once, and no other event gets its
// sequence.
func TestN11_AMovedLeaderMayHaveTheBatch(t *testing.T) {
	t.Parallel()
	k := newSickCluster(t)
	var moved, leaderless atomic.Bool
	u := fakeOptions(k.brokers...)
	u.cfg.ParkAfter = 500 * time.Millisecond
	u.cfg.Dial = func(ctx context.Context, network, addr string) (net.Conn, error) {
		c, err := (&net.Dialer{}).DialContext(ctx, network, addr)
		return movedConn{c, &moved}, err
	}

	k.overrideLayout(func() (int, bool) { return 1, leaderless.Load() })
	d := openWithHolder(t, u)
	d.sendSequence("a", 0, 1)
	d.waitResolved(1)

	k.Fault(kfake.Fault{Keys: []kmsg.Key{kmsg.Produce}, Topic: "a", Err: kerr.NotEnoughReplicasAfterAppend, Count: 1})
	k.forbidWrites()
	leaderless.Store(true)
	moved.Store(true)
	d.sendSequence("a", 1, 2)
	d.waitUntil("the partition is parked", func() bool { return len(d.held) == 1 })
	if moved.Load() {
		t.Fatal("no response was changed")
	}

	k.on.Store(false)
	leaderless.Store(false)
	stacktest.Eventually(t, "the leader is back", func() bool {
		retry.Signal(d.r.refresher.wake)
		d.mu.Lock()
		ready := len(d.ready) > 0
		d.mu.Unlock()
		d.r.mu.Lock()
		defer d.r.mu.Unlock()
		return ready || d.r.Sink.ended != nil
	})

	if d.r.Sink.ended != nil {
		if err := d.r.waitEnded(t); !errors.Is(err, ErrReopen) {
			t.Fatalf("the sink ended with %v, want ErrReopen", err)
		}
		d.openNext()
	}

	_, _ = d.send(newRecord("a", "other", "other/0"))
	d.r.Flush()
	d.waitResolved(2 + d.foundCount())
	d.release()
	d.waitResolved(3)
	if got := valuesOf(readTopic(t, k.brokers, "a"))[0]; !slices.Equal(got, []string{"k/0", "k/1", "other/0"}) {
		t.Errorf("the log is %v, want each event once", got)
	}
}

// foundCount returns 1 if the read-back has found the record that was given back, and 0 otherwise.
func (d *testHolder) foundCount() int { return 1 - d.heldCount() }

// movedConn replaces one NOT_ENOUGH_REPLICAS_AFTER_APPEND of partition 0 by NOT_LEADER_OR_FOLLOWER.
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

// TestN11_DeferredWritesAreParkedBeforeTheOthersStop: brokers defer three partitions, none of which
// holds much memory. They are parked as soon as the memory or the window is nearly full and they
// hold its low end, and not before.
func TestN11_DeferredWritesAreParkedBeforeTheOthersStop(t *testing.T) {
	t.Parallel()
	kc, brokers := newFakeCluster(t, kfake.NumBrokers(1), kfake.SeedTopics(3, "a"), kfake.SeedTopics(1, "b"))
	var on atomic.Bool
	on.Store(true)
	kc.Fault(kfake.Fault{
		Keys:  []kmsg.Key{kmsg.Produce},
		Topic: "a",
		Err:   kerr.NotEnoughReplicas,
		Count: -1,
		When:  func(kmsg.Request) bool { return on.Load() },
	})
	d := openWithHolder(t, fakeOptions(brokers...))
	full := false
	d.mu.Lock()
	d.pressed = func() (record.Ticket, bool, bool) { return record.Ticket(1_000_000), full, false }
	d.mu.Unlock()

	for i := range 30 {
		_, _ = d.send(newRecord("a", fmt.Sprint("k", i%6), fmt.Sprintf("k%d/%d", i%6, i/6)))
	}
	d.sendSequence("b", 0, 5)
	d.r.acks.waitUntil(testTimeout, "the other topic flows", func() bool { return len(d.r.acks.acked) == 5 })

	parkLater := func() int {
		d.r.parker.parkUnwritable(time.Now().Add(time.Second))
		return d.heldCount()
	}
	if parkLater() != 0 {
		t.Fatal("parked although there is room")
	}
	d.mu.Lock()
	full = true
	d.mu.Unlock()
	if parkLater() != 0 {
		t.Fatal("parked although another event is the first")
	}
	// A partition with a request in flight is left out. It is parked by a later call, when it holds the first event itself.
	d.mu.Lock()
	d.pressed = func() (record.Ticket, bool, bool) { return slices.Min(slices.Collect(maps.Keys(d.sent))), true, false }
	d.mu.Unlock()
	stacktest.Eventually(t, "all three are parked", func() bool { return parkLater() == 30 })
	on.Store(false)
	stacktest.Eventually(t, "all of it is released", func() bool { d.tryRelease(); return d.heldCount() == 0 })
	d.waitResolved(35)
	requireInOrder(t, readTopic(t, brokers, "a"), 6, 5)
}

// TestN11_LoadParksAtOnce: a target that holds more than its share of the memory does not wait for
// ParkAfter.
func TestN11_LoadParksAtOnce(t *testing.T) {
	t.Parallel()
	u := sinkOptions{cfg: testConfig{ParkAfter: time.Hour, ParkBytes: 40 << 10}}
	d := openWithHolder(t, u)
	missing := stacktest.Name(t)
	d.sendSequence(missing, 0, 1)
	stacktest.Eventually(t, "the topic is found missing", func() bool {
		return slices.ContainsFunc(d.r.State(), func(b Unwritable) bool { return b.Kind == kindMissing && !b.Parked })
	})

	for i := range 20 {
		x := newRecord(missing, "k", fmt.Sprintf("k/%d", i))
		x.Headers = append(x.Headers, record.Header{Key: []byte("x"), Value: make([]byte, 1000)})
		_, _ = d.send(x)
	}
	d.waitUntil("it is parked", func() bool { return len(d.held) > 10 })
}

// TestN11_UnreachableBrokersParkNothing: during an outage records wait, and are not given back.
func TestN11_UnreachableBrokersParkNothing(t *testing.T) {
	t.Parallel()
	_, brokers := newFakeCluster(t, kfake.NumBrokers(1), kfake.SeedTopics(1, "a"))
	var away atomic.Bool
	u := fakeOptions(brokers...)
	u.cfg.ParkAfter, u.cfg.ParkBytes = 50*time.Millisecond, 400
	u.cfg.Dial = func(ctx context.Context, network, addr string) (net.Conn, error) {
		if away.Load() {
			return nil, errors.New("away")
		}
		return (&net.Dialer{}).DialContext(ctx, network, addr)
	}
	d := openWithHolder(t, u)
	d.sendSequence("a", 0, 1)
	d.waitResolved(1)

	away.Store(true)
	d.r.mu.Lock()
	for _, l := range d.r.loops.byID {
		l.interruptLocked()
	}
	d.r.mu.Unlock()
	d.sendSequence("a", 1, 50)

	p := d.r.topics["a"].partitions[0]
	var tries int
	stacktest.Eventually(t, "it is tried for longer than ParkAfter", func() bool {
		d.r.mu.Lock()
		defer d.r.mu.Unlock()
		tries = max(tries, p.tries)
		return p.obstacle.kind == kindUnreachable && time.Since(p.since) > 400*time.Millisecond && p.tries > 5
	})

	away.Store(false)
	d.waitResolved(50)
	if len(d.calls) != 0 {
		t.Errorf("records were given back in %d calls, want none", len(d.calls))
	}
	requireInOrder(t, readTopic(t, brokers, "a"), 1, 50)
}

// TestN11_QuarantineIsParked: records are given back before the sink has found the records that an earlier
// owner has sent, and the reread ends before this, too. The reread may end before or after the records are
// given back. The next sink reads the partition from its stored offset (N8). It finds the records
// that are there, and the others are sent.
func TestN11_QuarantineIsParked(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct{ before, during int }{
		"before the end of the reread": {4, 12},
		"after the end of the reread":  {12, 12},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			quarantineIsParked(t, c.before, c.during)
		})
	}
}

// quarantineIsParked sends records up to the number before, which are given back, more during the
// reread up to the number during, and two after the reread. If both numbers are the same, the
// reread ends first.
func quarantineIsParked(t *testing.T, before, during int) {
	t.Helper()
	first, topic := openSuccessor(t, 10)
	if err := first.runAndKill(t); err != nil {
		t.Fatal(err)
	}

	d := openWithHolder(t, sinkOptions{
		txid:   "outrelay.test." + topic,
		claims: first.claims,
		noRun:  true,
		cfg:    testConfig{ParkAfter: 50 * time.Millisecond},
	})
	p, hits := d.r.quarantineOnly(topic)
	if hits.Len() != 10 {
		t.Fatalf("%d hits, want 10", hits.Len())
	}

	d.sendSequence(topic, 0, before)
	if before == during {
		d.r.EndReread()
	}
	stacktest.Eventually(t, "all records are given back", func() bool {
		d.r.parker.parkUnwritable(time.Now())
		return d.heldCount() == before
	})

	d.sendSequence(topic, before, during)
	d.r.EndReread()
	d.sendSequence(topic, 12, 14)
	if d.heldCount() != 14 {
		t.Fatalf("%d records are held, want 14", d.heldCount())
	}

	d.r.run(t)
	stacktest.Eventually(t, "the partition has a leader", func() bool {
		retry.Signal(d.r.refresher.wake)
		d.r.mu.Lock()
		defer d.r.mu.Unlock()
		return p.loop != nil
	})

	d.r.fail(ErrReopen)
	d.openNext()
	d.release()
	d.waitResolved(14)

	requireInOrder(t, readTopic(t, stacktest.Brokers(t), topic), 1, 14)
	for i := range 10 {
		if at := d.r.acks.acked[record.Ticket(i)|record.Side]; at.off >= p.ackedEnd {
			t.Errorf("k/%d was acked at offset %d, want below %d: it was sent again", i, at.off, p.ackedEnd)
		}
	}
}

// runAndKill starts a sink that does not run yet, and kills it.
func (r *testSink) runAndKill(t *testing.T) error {
	r.run(t)
	return r.kill()
}

// parkedLines gets the lines about parked partitions.
type parkedLines chan string

func (p parkedLines) Write(line []byte) (int, error) {
	if strings.Contains(string(line), "cannot write partitions of a topic") {
		p <- string(line)
	}
	return len(line), nil
}

// TestN11_ADeletedTopicIsParkedByPartition: each partition of a deleted topic is parked, in one line of the log. Its
// records are sent when the topic exists again.
func TestN11_ADeletedTopicIsParkedByPartition(t *testing.T) {
	t.Parallel()
	topic := stacktest.Topic(t, 2)
	lines := make(parkedLines, 100)
	u := sinkOptions{}
	u.cfg.Log = slog.New(slog.NewTextHandler(lines, nil))
	d := openWithHolder(t, u)
	d.sendSequence(topic, 0, 5)
	d.waitResolved(5)

	cl := newAdmin(t)
	if _, err := cl.DeleteTopics(t.Context(), &kafka.DeleteTopicsRequest{Topics: []string{topic}}); err != nil {
		t.Fatal(err)
	}
	stacktest.Eventually(t, "its deletion is seen", func() bool {
		retry.Signal(d.r.refresher.wake)
		d.r.mu.Lock()
		defer d.r.mu.Unlock()
		return d.r.topics[topic].partitions[0].parked && d.r.topics[topic].partitions[1].parked
	})
	if state := d.r.State(); len(state) != 0 {
		t.Errorf("nothing waits, but the state is %+v", state)
	}
	if first := <-lines; !strings.Contains(first, `partitions="[0 1]"`) || len(lines) != 0 {
		t.Errorf("got %q and %d lines more, want one line for both partitions", first, len(lines))
	}

	for i := range 10 {
		if _, err := d.send(newRecord(topic, fmt.Sprint("k", i%2), fmt.Sprintf("k%d/%d", i%2, i/2))); err == nil {
			t.Fatal("a parked partition takes a record")
		}
	}

	stacktest.CreateTopic(t, topic, 2)
	d.waitUntil("both are ready", func() bool { return len(d.ready) == 2 })
	d.release()
	d.waitResolved(15)
	requireInOrder(t, readTopic(t, stacktest.Brokers(t), topic), 2, 5)
}

// TestN11_AGrownTopicFlowsBesideALeaderlessPartition: an old partition has no leader, and a batch
// that may be in its log. The new partitions are used anyway, except for records that may be in the
// old partition.
func TestN11_AGrownTopicFlowsBesideALeaderlessPartition(t *testing.T) {
	t.Parallel()
	kc, brokers := newFakeCluster(t, kfake.NumBrokers(1), kfake.SeedTopics(4, "a"), kfake.SeedTopics(1, "b"))
	k := &sickCluster{Cluster: kc, brokers: brokers}
	var partitions atomic.Int32
	var leaderless atomic.Bool
	partitions.Store(2)
	k.overrideLayout(func() (int, bool) { return int(partitions.Load()), leaderless.Load() })
	d := openWithHolder(t, fakeOptions(brokers...))
	const keys = 12
	round := func(n int) {
		for i := range keys {
			_, _ = d.send(newRecord("a", fmt.Sprint("k", i), fmt.Sprintf("k%d/%d", i, n)))
		}
		d.r.Flush()
	}

	round(0)
	d.waitResolved(keys)

	oldPartition := kfake.Fault{Keys: []kmsg.Key{kmsg.Produce}, Topic: "a", Partitions: []int32{0}}
	appended, notAppended := oldPartition, oldPartition
	appended.Err, appended.Count = kerr.NotEnoughReplicasAfterAppend, 1
	notAppended.Err, notAppended.Count = kerr.NotEnoughReplicas, -1
	notAppended.When = func(kmsg.Request) bool { return k.on.Load() }
	k.Fault(appended)
	k.Fault(notAppended)
	k.on.Store(true)
	round(1)
	head := func() *partition { return d.r.topics["a"].partitions[0] }
	stacktest.Eventually(t, "the batch may be appended", func() bool {
		d.r.mu.Lock()
		defer d.r.mu.Unlock()
		return len(head().queue) > 0 && head().queue[0].maybeAppended
	})

	leaderless.Store(true)
	retry.Signal(d.r.refresher.wake)
	d.waitUntil("the partition is parked", func() bool { return len(d.held) > 0 })

	old := d.heldCount()
	partitions.Store(4)
	retry.Signal(d.r.refresher.wake)
	if err := d.r.waitEnded(t); !errors.Is(err, ErrReopen) {
		t.Fatalf("the sink ended with %v, want ErrReopen", err)
	}
	d.openNext()
	if n := len(d.r.topics["a"].partitions); n != 4 {
		t.Fatalf("the next sink uses %d partitions, want 4", n)
	}

	// No record of the old partition goes to a new one.
	d.tryRelease()
	if n := d.heldCount(); n != old {
		t.Errorf("%d of %d records of the old partition were sent elsewhere", old-n, old)
	}

	round(2)
	acked := 3*keys - old*2
	d.r.acks.waitUntil(testTimeout, "the other keys flow", func() bool { return len(d.r.acks.acked) == acked })

	k.on.Store(false)
	leaderless.Store(false)
	retry.Signal(d.r.refresher.wake)
	if err := d.r.waitEnded(t); !errors.Is(err, ErrReopen) {
		t.Fatalf("the sink ended with %v, want ErrReopen", err)
	}
	d.openNext()
	d.release()
	d.waitResolved(3 * keys)
	requireInOrder(t, readTopic(t, brokers, "a"), keys, 3)
}
