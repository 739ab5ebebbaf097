package sink

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/segmentio/kafka-go"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/outrelay/outrelay/internal/base/retry"
	"github.com/outrelay/outrelay/internal/contract/keyhash"
	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/kafkawire"
	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
)

// newAdmin returns a client for requests that the sink does not send.
func newAdmin(tb testing.TB) *kafka.Client {
	tb.Helper()
	tr := &kafka.Transport{MetadataTTL: time.Second}
	tb.Cleanup(tr.CloseIdleConnections)
	return &kafka.Client{Addr: kafka.TCP(stacktest.Brokers(tb)...), Transport: tr, Timeout: testTimeout / 2}
}

// TestN09_EndOffsetIsSavedBeforeTheFirstRecord: records wait until the end offsets of their topic
// are stored.
func TestN09_EndOffsetIsSavedBeforeTheFirstRecord(t *testing.T) {
	t.Parallel()
	topic := stacktest.Topic(t, 2)
	before := openSink(t, sinkOptions{txid: "outrelay.other." + topic})
	// The topic is not empty, because another client writes to it.
	for i := range 7 {
		x := newRecord(topic, "k", fmt.Sprint("foreign-", i))
		x.Partition = 1
		before.send(t, x)
	}
	before.Flush()
	before.acks.waitResolved(7)

	c := &claims{fail: errors.New("the document cannot be written")}
	r := openOnFreshClaims(t, c)
	for i := range 10 {
		r.send(t, newRecord(topic, "k", fmt.Sprintf("k/%d", i)))
	}
	r.Flush()
	stacktest.Eventually(t, "the topic waits for the write", func() bool {
		c.mu.Lock()
		defer c.mu.Unlock()
		// The first write stores the sender. The next two, of the offsets, fail.
		return c.saves >= 3
	})
	if log := readTopic(t, stacktest.Brokers(t), topic); len(log[0]) != 0 || len(log[1]) != 7 {
		t.Fatalf("%d and %d records are in the topic before its offsets are saved, want the 7 foreign ones", len(log[0]), len(log[1]))
	}

	c.mu.Lock()
	c.fail = nil
	c.saved = func(offsets map[string][]int64) {
		if !slices.Equal(offsets[topic], []int64{0, 7}) {
			t.Errorf("saved %v, want 0 and 7", offsets[topic])
		}
	}

	c.mu.Unlock()
	r.acks.waitResolved(10)
	for p, want := range []int64{0, 7} {
		tp := record.TopicPartition{Topic: topic, Partition: int32(p)}
		if got := r.acks.restored[tp]; !slices.Equal(got, []int64{want}) {
			t.Errorf("partition %d: restored %v, want %d", p, got, want)
		}
	}

	log := valuesOf(readTopic(t, stacktest.Brokers(t), topic))
	p := int32(keyhash.Murmur2([]byte("k"))&0x7fffffff) % 2
	got := slices.DeleteFunc(log[p], func(v string) bool { return strings.HasPrefix(v, "foreign") })
	if len(got) != 10 || got[0] != "k/0" || got[9] != "k/9" {
		t.Fatalf("partition %d contains %v, want k/0 to k/9", p, got)
	}
}

// openOnFreshClaims opens a sink whose first save, that of the sender, succeeds even if c fails.
func openOnFreshClaims(t *testing.T, c *claims) *testSink {
	t.Helper()
	fail := c.fail
	c.fail = nil
	r := openSink(t, sinkOptions{claims: c, noRun: true})
	c.fail = fail
	r.run(t)
	return r
}

// TestN09_NothingIsSentBeforeAllEndsAreKnown: the end of one partition cannot be read. Its stored
// offset would be 0, and a later owner would read the whole partition.
func TestN09_NothingIsSentBeforeAllEndsAreKnown(t *testing.T) {
	t.Parallel()
	kc, brokers := newFakeCluster(t, kfake.NumBrokers(1), kfake.SeedTopics(2, "a"), kfake.SeedTopics(1, "b"))
	var sick atomic.Bool
	sick.Store(true)
	kc.Fault(kfake.Fault{
		Keys:       []kmsg.Key{kmsg.ListOffsets},
		Topic:      "a",
		Partitions: []int32{1},
		Err:        kerr.LeaderNotAvailable,
		Count:      -1,
		When:       func(kmsg.Request) bool { return sick.Load() },
	})

	r := openSink(t, fakeOptions(brokers...))
	r.send(t, newRecord("b", "k", "k/0"))
	for i := range 6 {
		r.send(t, newRecord("a", fmt.Sprint("k", i), fmt.Sprintf("k%d/0", i)))
	}
	r.acks.waitUntil(testTimeout, "the other topic flows", func() bool { return len(r.acks.acked) == 1 })
	stacktest.Eventually(t, "State reports the missing leader", func() bool {
		state := r.State()
		return len(state) == 1 && state[0].Topic == "a" && state[0].Kind == kindNoLeader && state[0].Records == 6
	})
	if _, offsets := r.claims.readDocument(); len(offsets["a"]) != 0 {
		t.Errorf("stored %v before the ends are known", offsets["a"])
	}

	sick.Store(false)
	r.acks.waitResolved(7)
	if _, offsets := r.claims.readDocument(); len(offsets["a"]) != 2 {
		t.Errorf("stored %v, want both ends", offsets["a"])
	}
}

// TestN09_NewPartitionsAreUsedByTheNextSink: when a topic has grown, the sink ends, at most once in
// reopenEvery. Until then it uses the old partitions. The next sink uses all of them, and the keys keep
// their order.
func TestN09_NewPartitionsAreUsedByTheNextSink(t *testing.T) {
	t.Parallel()
	topic := stacktest.Topic(t, 1)
	txid, c := "outrelay.test."+topic, &claims{}
	first := takeOver(t, txid, c)
	send := func(r *testSink, from, to int) {
		for i := from; i < to; i++ {
			r.send(t, newRecord(topic, fmt.Sprint("k", i%10), fmt.Sprintf("k%d/%d", i%10, i/10)))
		}
		r.Flush()
	}
	send(first, 0, 20)
	first.acks.waitResolved(20)

	// As if a sink had just ended.
	first.c.takeReopen(time.Now())
	addPartitions(t, topic, 3)
	if err := first.refresher.loadLayout(t.Context()); err != nil {
		t.Fatal(err)
	}
	send(first, 20, 40)
	first.acks.waitResolved(40)

	first.c.reopened.Store(nil)
	if err := first.refresher.loadLayout(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := first.waitEnded(t); !errors.Is(err, ErrReopen) {
		t.Fatalf("the sink ended with %v, want ErrReopen", err)
	}

	second := takeOver(t, txid, c)
	if _, offsets := c.readDocument(); len(offsets[topic]) != 3 {
		t.Fatalf("saved offsets %v, want three", offsets[topic])
	}
	send(second, 0, 60)
	second.acks.waitResolved(60)

	log := readTopic(t, stacktest.Brokers(t), topic)
	requireInOrder(t, log, 10, 6)
	if len(log) != 3 {
		t.Errorf("%d partitions have records, want all 3", len(log))
	}
}

// TestN09_GrowthWaitsForLeaders: a takeover would put new partitions without a leader into quarantine,
// so the sink does not end yet.
func TestN09_GrowthWaitsForLeaders(t *testing.T) {
	t.Parallel()
	r := openSink(t, sinkOptions{noRun: true})
	r.mu.Lock()
	r.findOrAddTopicLocked("t").addPartitions(1)
	r.mu.Unlock()
	endAfter := func(leader int32) error {
		parts := []kafkawire.PartitionLayout{{}, {Leader: leader}}
		r.refresher.applyLayout(&kafkawire.Layout{Topics: map[string]kafkawire.TopicLayout{"t": {Partitions: parts}}})
		r.mu.Lock()
		defer r.mu.Unlock()
		return r.Sink.ended
	}

	if err := endAfter(-1); err != nil {
		t.Errorf("the sink would end with %v, want it to wait for a leader", err)
	}
	if err := endAfter(0); !errors.Is(err, ErrReopen) {
		t.Errorf("the sink would end with %v, want ErrReopen", err)
	}
}

// TestMissingTopicHoldsItselfAlone: the records of a missing topic wait, and State reports the fix.
// Another topic flows.
func TestMissingTopicHoldsItselfAlone(t *testing.T) {
	t.Parallel()
	there, missing := stacktest.Topic(t, 1), stacktest.Name(t)
	r := openSink(t, sinkOptions{})
	for i := range 30 {
		r.send(t, newRecord(missing, "k", fmt.Sprintf("k/%d", i)))
		r.send(t, newRecord(there, "k", fmt.Sprintf("k/%d", i)))
		r.Flush()
	}
	r.acks.waitUntil(testTimeout, "the other topic flows", func() bool { return len(r.acks.acked) == 30 })
	stacktest.Eventually(t, "State reports the fix", func() bool {
		return slices.ContainsFunc(r.State(), func(b Unwritable) bool {
			return b.Topic == missing && b.Partition == -1 && b.Kind == kindMissing && b.Records == 30 &&
				strings.Contains(b.Reason(), "topics.create")
		})
	})

	stacktest.CreateTopic(t, missing, 2)
	r.acks.waitResolved(60)
	requireInOrder(t, readTopic(t, stacktest.Brokers(t), missing), 1, 30)
	if left := r.State(); len(left) != 0 {
		t.Fatalf("still blocked: %+v", left)
	}
}

// TestTopicIsCreatedOnDemand: a missing topic is created with the configured options.
func TestTopicIsCreatedOnDemand(t *testing.T) {
	t.Parallel()
	topic := stacktest.Name(t)
	create := &kafkawire.TopicCreate{
		Partitions:  4,
		Replication: 1,
		Configs:     map[string]string{"max.message.bytes": "123456", "cleanup.policy": "compact"},
	}
	r := openSink(t, sinkOptions{cfg: testConfig{Create: create}})
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		_, _ = newAdmin(t).DeleteTopics(ctx, &kafka.DeleteTopicsRequest{Topics: []string{topic}})
	})

	for i := range 40 {
		r.send(t, newRecord(topic, fmt.Sprint("k", i%8), fmt.Sprintf("k/%d", i/8)))
	}
	r.Flush()
	r.acks.waitResolved(40)
	requireInOrder(t, readTopic(t, stacktest.Brokers(t), topic), 8, 5)

	got, err := r.opener.kafka.DescribeTopics(t.Context(), []string{topic})
	if err != nil {
		t.Fatal(err)
	}
	if c := got[topic]; c.MaxMessageBytes != 123456 || c.CleanupPolicy != "compact" || c.MinISR != 1 {
		t.Fatalf("created with %+v", c)
	}
}

// TestTheReasonWhyATopicCannotBeCreatedIsReported: State reports why a topic cannot be created.
func TestTheReasonWhyATopicCannotBeCreatedIsReported(t *testing.T) {
	t.Parallel()
	topic := stacktest.Name(t)
	r := openSink(t, sinkOptions{cfg: testConfig{Create: &kafkawire.TopicCreate{Partitions: 1, Replication: 5}}})
	r.send(t, newRecord(topic, "k", "1"))
	stacktest.Eventually(t, "State reports the reason", func() bool {
		return slices.ContainsFunc(r.State(), func(b Unwritable) bool {
			return b.Topic == topic && strings.Contains(b.Reason(), "topics.create.replication")
		})
	})

	bad := topic + "/no"
	r.send(t, newRecord(bad, "k", "1"))
	stacktest.Eventually(t, "State reports the impossible name", func() bool {
		return slices.ContainsFunc(r.State(), func(b Unwritable) bool {
			return b.Topic == bad && strings.Contains(b.Reason(), "does not allow the topic name")
		})
	})
}

// TestTheFailureOfTheControllerIsReported: State reports why no topic can be created, as long as that is the case.
func TestTheFailureOfTheControllerIsReported(t *testing.T) {
	t.Parallel()
	kc, brokers := newFakeCluster(t, kfake.NumBrokers(1))
	kc.Fault(kfake.Fault{Keys: []kmsg.Key{kmsg.CreateTopics}, Err: kerr.TopicAlreadyExists, Count: -1})
	var responds atomic.Bool
	kc.ControlKey(int16(kmsg.CreateTopics), func(kmsg.Request) (kmsg.Response, error, bool) {
		kc.KeepControl()
		if responds.Load() {
			return nil, nil, false
		}
		return nil, errors.New("the connection is closed"), true
	})
	u := fakeOptions(brokers...)
	u.cfg.Create = &kafkawire.TopicCreate{Partitions: 1}
	r := openSink(t, u)
	r.send(t, newRecord("new", "k", "k/0"))
	waitFor := func(parts ...string) {
		t.Helper()
		stacktest.Eventually(t, strings.Join(parts, ", "), func() bool {
			state := r.State()
			return len(state) == 1 && state[0].Kind == kindMissing &&
				!slices.ContainsFunc(parts, func(part string) bool { return !strings.Contains(state[0].Reason(), part) })
		})
	}
	waitFor("does not exist, and Kafka does not create it", "check the controller")

	// Kafka creates the topic, but no broker shows it.
	responds.Store(true)
	waitFor("being created")
}

// TestManyMissingTopicsAreCreatedApart: the controller does not respond while many topics are missing. A topic that exists is
// opened in the meantime. The others need few requests, and one that cannot be created does not hinder the rest.
func TestManyMissingTopicsAreCreatedApart(t *testing.T) {
	t.Parallel()
	kc, brokers := newFakeCluster(t, kfake.NumBrokers(1), kfake.SeedTopics(1, "there"))
	release := make(chan struct{})
	var requests atomic.Int32
	kc.ControlKey(int16(kmsg.CreateTopics), func(kmsg.Request) (kmsg.Response, error, bool) {
		kc.KeepControl()
		requests.Add(1)
		kc.SleepControl(func() { <-release })
		return nil, nil, false
	})
	kc.Fault(kfake.Fault{Keys: []kmsg.Key{kmsg.CreateTopics}, Topic: "new-0", Err: kerr.PolicyViolation, Count: -1})

	const missing = 60
	u := fakeOptions(brokers...)
	u.cfg.Create, u.cfg.Patience = &kafkawire.TopicCreate{Partitions: 1, Replication: 1}, testTimeout
	r := openSink(t, u)
	for i := range missing {
		r.send(t, newRecord(fmt.Sprint("new-", i), "k", "k/0"))
	}
	stacktest.Eventually(t, "the controller has a request", func() bool { return requests.Load() > 0 })
	r.send(t, newRecord("there", "k", "k/0"))
	r.acks.waitUntil(testTimeout, "the topic that exists is used", func() bool { return len(r.acks.acked) == 1 })

	close(release)
	r.acks.waitUntil(testTimeout, "the other topics are created", func() bool { return len(r.acks.acked) == missing })
	if n := requests.Load(); n > missing/2 {
		t.Errorf("%d topics took %d requests", missing, n)
	}
	state := r.State()
	if len(state) != 1 || state[0].Topic != "new-0" || !strings.Contains(state[0].Reason(), "policy") {
		t.Errorf("waiting: %+v, want the topic that a policy rejects", state)
	}
}

// TestN11_ATopicThatIsCreatedInVainIsParked: Kafka creates the topic, but no broker shows it. It must not fill the memory.
func TestN11_ATopicThatIsCreatedInVainIsParked(t *testing.T) {
	t.Parallel()
	kc, brokers := newFakeCluster(t, kfake.NumBrokers(1))
	kc.Fault(kfake.Fault{Keys: []kmsg.Key{kmsg.CreateTopics}, Err: kerr.TopicAlreadyExists, Count: -1})
	u := fakeOptions(brokers...)
	u.cfg.Create = &kafkawire.TopicCreate{Partitions: 1}
	d := openWithHolder(t, u)
	d.sendSequence("ghost", 0, 3)
	d.waitUntil("the topic is parked", func() bool { return len(d.held) == 3 })
}

// TestN11_MissingTopicsAreParkedWithoutAController: the controller does not respond, or no broker is reachable.
// Its records do not keep the memory from other topics.
func TestN11_MissingTopicsAreParkedWithoutAController(t *testing.T) {
	t.Parallel()
	for name, respond := range map[string]func(kc *kfake.Cluster, ended <-chan struct{}) error{
		"hangs": func(kc *kfake.Cluster, ended <-chan struct{}) error {
			kc.SleepControl(func() { <-ended })
			return nil
		},
		"closes the connection": func(*kfake.Cluster, <-chan struct{}) error { return errors.New("the connection is closed") },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			kc, brokers := newFakeCluster(t, kfake.NumBrokers(1), kfake.SeedTopics(1, "there"), kfake.SleepOutOfOrder())
			ended := make(chan struct{})
			defer close(ended)
			requests := make(chan struct{}, 1)
			kc.ControlKey(int16(kmsg.CreateTopics), func(kmsg.Request) (kmsg.Response, error, bool) {
				kc.KeepControl()
				retry.Signal(requests)
				err := respond(kc, ended)
				return nil, err, err != nil
			})

			u := fakeOptions(brokers...)
			u.cfg.Create, u.cfg.ParkBytes = &kafkawire.TopicCreate{Partitions: 1}, 400
			d := openWithHolder(t, u)
			const missing = 50
			d.sendSequence("missing", 0, missing)
			<-requests
			d.waitUntil("the missing topic is parked", func() bool { return len(d.held) == missing })
			d.sendSequence("there", 0, 1)
			d.r.acks.waitUntil(testTimeout, "the topic that exists is used", func() bool { return len(d.r.acks.acked) == 1 })
		})
	}
}

// TestN11_NewTopicsMayFillTheMemoryForAMoment: the records of a topic that is created do not go through the store because there are
// many of them.
func TestN11_NewTopicsMayFillTheMemoryForAMoment(t *testing.T) {
	t.Parallel()
	_, brokers := newFakeCluster(t, kfake.NumBrokers(1))
	u := fakeOptions(brokers...)
	u.cfg.Create, u.cfg.ParkBytes, u.cfg.ParkAfter = &kafkawire.TopicCreate{Partitions: 1}, 400, time.Hour
	d := openWithHolder(t, u)
	d.r.mu.Lock()
	d.r.parker.settleTime = time.Hour
	d.r.mu.Unlock()
	d.sendSequence("new", 0, 50)
	d.waitResolved(50)
	if n := len(d.withdrawnTickets()); n > 0 {
		t.Errorf("%d records were given back", n)
	}
}

// TestTopicsAreCreatedWhileOthersAreOpened: the brokers do not show the first topics yet. The next ones do not wait for that.
func TestTopicsAreCreatedWhileOthersAreOpened(t *testing.T) {
	t.Parallel()
	kc, brokers := newFakeCluster(t, kfake.NumBrokers(1))
	kc.Fault(kfake.Fault{Keys: []kmsg.Key{kmsg.CreateTopics}, Err: kerr.TopicAlreadyExists, Count: -1})
	requests := make(chan struct{}, 10)
	kc.ControlKey(int16(kmsg.CreateTopics), func(kmsg.Request) (kmsg.Response, error, bool) {
		kc.KeepControl()
		select {
		case requests <- struct{}{}:
		default:
		}
		return nil, nil, false
	})

	u := fakeOptions(brokers...)
	u.cfg.Create = &kafkawire.TopicCreate{Partitions: 1}
	r := openSink(t, u)
	r.mu.Lock()
	r.Sink.opener.createdFor = time.Hour
	r.mu.Unlock()
	for i := range 2 * createAtOnce {
		r.send(t, newRecord(fmt.Sprint("new-", i), "k", "k/0"))
	}
	for i := range 2 {
		select {
		case <-requests:
		case <-time.After(testTimeout):
			t.Fatalf("%d requests after %s: the next topics wait for the first", i, testTimeout)
		}
	}
}

// TestN09_ATopicThatIsCreatedLateIsOpenedWhole: a topic was missing for longer than the time that parks it. When it is
// created, one of its partitions has no leader for a moment. It gets no quarantine, which only a takeover would end.
func TestN09_ATopicThatIsCreatedLateIsOpenedWhole(t *testing.T) {
	t.Parallel()
	kc, brokers := newFakeCluster(t, kfake.NumBrokers(1))
	kc.Fault(kfake.Fault{
		Keys: []kmsg.Key{kmsg.ListOffsets}, Topic: "late", Partitions: []int32{1}, Err: kerr.NotLeaderForPartition, Count: 1,
	})
	u := fakeOptions(brokers...)
	u.cfg.ParkAfter = 3 * openEvery
	var log stacktest.Buffer
	u.cfg.Log = slog.New(slog.NewTextHandler(&log, nil))
	d := openWithHolder(t, u)
	d.sendSequence("late", 0, 3)
	d.waitUntil("the missing topic is parked", func() bool { return len(d.held) == 3 })

	if err := newClient(t, testConfig{Brokers: brokers}).CreateTopic(t.Context(), "late", kafkawire.TopicCreate{Partitions: 2}); err != nil {
		t.Fatal(err)
	}
	d.waitUntil("the topic is ready", func() bool { return slices.Contains(d.ready, "late") })
	if list := d.r.keeper.session.Quarantined(); len(list) > 0 {
		t.Errorf("in quarantine: %v", list)
	}
	d.release()
	d.waitResolved(3)

	// The log has the cause once for each consequence, with the command that ends it, and no problem of the new topic.
	problems := slices.DeleteFunc(strings.Split(log.String(), "\n"), func(line string) bool {
		return !strings.Contains(line, "level=WARN") && !strings.Contains(line, "level=ERROR")
	})
	if len(problems) != 2 {
		t.Errorf("got %d problems in the log, want 2:\n%s", len(problems), strings.Join(problems, "\n"))
	}
	for i, consequence := range []string{"its records wait", "its records are parked"} {
		want := fmt.Sprintf(`msg="cannot write a topic; %s" topic=late error="topic \"late\" does not exist" fix="outrelay topics create late, or `, consequence)
		if i < len(problems) && !strings.Contains(problems[i], want) {
			t.Errorf("got the line %q, want %q", problems[i], want)
		}
	}
}

// TestTopicDeletedMidRunIsHeldAndComesBack: the records of a deleted topic wait, and are sent when
// the topic is created again, whose offsets start at 0.
func TestTopicDeletedMidRunIsHeldAndComesBack(t *testing.T) {
	t.Parallel()
	topic := stacktest.Name(t)
	stacktest.CreateTopic(t, topic, 1)
	r := openSink(t, sinkOptions{})
	for i := range 5 {
		r.send(t, newRecord(topic, "k", fmt.Sprintf("k/%d", i)))
	}
	r.Flush()
	r.acks.waitResolved(5)

	res, err := newAdmin(t).DeleteTopics(t.Context(), &kafka.DeleteTopicsRequest{Topics: []string{topic}})
	if err != nil || res.Errors[topic] != nil {
		t.Fatal(err, res)
	}
	// Before that the broker may accept records, and lose them.
	stacktest.Eventually(t, "the sink has seen the deletion", func() bool {
		retry.Signal(r.refresher.wake)
		r.mu.Lock()
		defer r.mu.Unlock()
		return r.topics[topic].obstacle.kind == kindMissing
	})

	for i := range 5 {
		r.send(t, newRecord(topic, "k", fmt.Sprintf("k/%d", i)))
		r.Flush()
	}
	stacktest.Eventually(t, "State reports the deletion", func() bool {
		return slices.ContainsFunc(r.State(), func(b Unwritable) bool { return b.Topic == topic && b.Kind == kindMissing })
	})

	stacktest.CreateTopic(t, topic, 1)
	r.acks.waitResolved(10)

	tp := record.TopicPartition{Topic: topic}
	if got := r.acks.restored[tp]; len(got) != 2 || got[1] != 0 {
		t.Errorf("restored %v, want a second offset, 0, for the new topic", got)
	}
	requireInOrder(t, readTopic(t, stacktest.Brokers(t), topic), 1, 5)
}

// TestN08_IdlePartitionsMoveTheirStoredOffset: the stored offset of an idle partition follows its
// end, but not during a reread, in flight or in quarantine.
func TestN08_IdlePartitionsMoveTheirStoredOffset(t *testing.T) {
	t.Parallel()
	topic := stacktest.Topic(t, 2)
	r := openSink(t, sinkOptions{})
	x := newRecord(topic, "k", "1")
	x.Partition = 0
	r.send(t, x)
	r.Flush()
	r.acks.waitResolved(1)

	other := openSink(t, sinkOptions{txid: "outrelay.other." + topic})
	for range 5 {
		x.Partition = 1
		other.send(t, x)
	}
	other.Flush()
	other.acks.waitResolved(5)

	// The sink itself must not refresh the offsets at the same time.
	if err := r.kill(); err != nil {
		t.Fatal(err)
	}
	// During the reread nothing moves: hits may be below the end.
	r.refreshIdleOffsets(t.Context(), r.refresher.openTopicNames())
	if len(r.acks.idle) != 0 {
		t.Fatalf("idle offsets %v during the reread, want none", r.acks.idle)
	}

	r.EndReread()
	r.refreshIdleOffsets(t.Context(), r.refresher.openTopicNames())
	for p, want := range []int64{1, 5} {
		if got := r.acks.idle[record.TopicPartition{Topic: topic, Partition: int32(p)}]; got != want {
			t.Errorf("partition %d: idle at %d, want %d", p, got, want)
		}
	}

	clear(r.acks.idle)
	r.mu.Lock()
	r.topics[topic].partitions[1].busy = true
	r.topics[topic].partitions[0].quarantine = true
	r.mu.Unlock()
	r.refreshIdleOffsets(t.Context(), r.refresher.openTopicNames())
	if len(r.acks.idle) != 0 {
		t.Fatalf("idle offsets %v of partitions that are in flight or in quarantine, want none", r.acks.idle)
	}

	r.mu.Lock()
	r.topics[topic].partitions[1].busy = false
	r.topics[topic].partitions[0].quarantine = false
	r.mu.Unlock()
}

// takeOver opens the sink of the next owner, with the state in c.
func takeOver(t *testing.T, txid string, c *claims) *testSink {
	t.Helper()
	return openSink(t, sinkOptions{txid: txid, claims: c})
}

// TestN07_RecordsSentBeforeAreAckedAtTheirOffsets: the read-back finds the records of the previous
// owner. They are acked at their offsets, and not sent again.
func TestN07_RecordsSentBeforeAreAckedAtTheirOffsets(t *testing.T) {
	t.Parallel()
	topic := stacktest.Topic(t, 3)
	txid, c := "outrelay.test."+topic, &claims{}
	first := takeOver(t, txid, c)
	for i := range 60 {
		first.send(t, newRecord(topic, fmt.Sprint("k", i%6), fmt.Sprintf("k%d/%d", i%6, i/6)))
		if i%7 == 0 {
			first.Flush()
		}
	}
	first.Flush()
	first.acks.waitResolved(60)
	if err := first.kill(); err != nil {
		t.Fatal(err)
	}

	// The checkpoint precedes all of them, so the stream repeats the 60 events. 60 more follow.
	second := takeOver(t, txid, c)
	for i := range 120 {
		second.send(t, newRecord(topic, fmt.Sprint("k", i%6), fmt.Sprintf("k%d/%d", i%6, i/6)))
	}
	second.Flush()
	second.acks.waitResolved(120)
	requireInOrder(t, readTopic(t, stacktest.Brokers(t), topic), 6, 20)

	for k := range record.Ticket(60) {
		if first.acks.acked[k] != second.acks.acked[k] {
			t.Errorf("ticket %d: acked at %v, want %v", k, second.acks.acked[k], first.acks.acked[k])
		}
	}

	x := newRecord(topic, "k0", "late/1")
	if err := first.Send(&x, 999); !errors.Is(err, errClosed) {
		t.Fatalf("Send of a closed sink returned %v, want ErrClosed", err)
	}

	second.EndReread()
	second.send(t, newRecord(topic, "k0", "k0/20"))
	second.Flush()
	second.acks.waitResolved(121)
}

// TestN07_FoundAlsoWhenTheTopicHasGrownSince: the topic has grown after the crash, so keys hash to
// other partitions.
func TestN07_FoundAlsoWhenTheTopicHasGrownSince(t *testing.T) {
	t.Parallel()
	topic := stacktest.Topic(t, 1)
	txid, c := "outrelay.test."+topic, &claims{}
	first := takeOver(t, txid, c)
	send := func(r *testSink, n int) {
		for i := range n {
			r.send(t, newRecord(topic, fmt.Sprint("k", i%10), fmt.Sprintf("k%d/%d", i%10, i/10)))
		}
		r.Flush()
	}

	send(first, 30)
	first.acks.waitResolved(30)
	if err := first.kill(); err != nil {
		t.Fatal(err)
	}

	addPartitions(t, topic, 4)
	second := takeOver(t, txid, c)
	send(second, 50)
	second.acks.waitResolved(50)
	requireInOrder(t, readTopic(t, stacktest.Brokers(t), topic), 10, 5)
}

// TestN07_FoundAlsoWhenTheGrowthWasStoredBeforeTheCrash: the stored offsets include the new
// partitions, and the checkpoint precedes events that were acknowledged in the old ones.
func TestN07_FoundAlsoWhenTheGrowthWasStoredBeforeTheCrash(t *testing.T) {
	t.Parallel()
	topic := stacktest.Topic(t, 1)
	txid, c := "outrelay.test."+topic, &claims{}
	first := takeOver(t, txid, c)
	send := func(r *testSink, n int) {
		for i := range n {
			r.send(t, newRecord(topic, fmt.Sprint("k", i%10), fmt.Sprintf("k%d/%d", i%10, i/10)))
		}
		r.Flush()
	}

	send(first, 30)
	first.acks.waitResolved(30)

	addPartitions(t, topic, 4)
	if err := first.kill(); err != nil {
		t.Fatal(err)
	}
	second := takeOver(t, txid, c)
	if _, offsets := c.readDocument(); len(offsets[topic]) != 4 {
		t.Fatalf("saved offsets %v, want four", offsets[topic])
	}
	if err := second.kill(); err != nil {
		t.Fatal(err)
	}

	third := takeOver(t, txid, c)
	send(third, 50)
	third.acks.waitResolved(50)
	requireInOrder(t, readTopic(t, stacktest.Brokers(t), topic), 10, 5)
}

// TestN07_TheOldPartitionOfAKeyIsReadBeforeItsRecordsGoElsewhere: the topic has grown since the
// crash, and the takeover cannot read the partition that the keys had before. Records that may be
// in it are not sent to new partitions, and the next sink finds them.
func TestN07_TheOldPartitionOfAKeyIsReadBeforeItsRecordsGoElsewhere(t *testing.T) {
	t.Parallel()
	topic := stacktest.Topic(t, 1)
	txid, c := "outrelay.test."+topic, &claims{}
	first := takeOver(t, txid, c)
	for i := range 30 {
		first.send(t, newRecord(topic, fmt.Sprint("k", i%10), fmt.Sprintf("k%d/%d", i%10, i/10)))
	}
	first.Flush()
	first.acks.waitResolved(30)
	if err := first.kill(); err != nil {
		t.Fatal(err)
	}

	addPartitions(t, topic, 4)
	d := openWithHolder(t, sinkOptions{txid: txid, claims: c, noRun: true})
	d.r.quarantineOnly(topic)
	d.r.run(t)
	for i := range 50 {
		_, _ = d.send(newRecord(topic, fmt.Sprint("k", i%10), fmt.Sprintf("k%d/%d", i%10, i/10)))
	}
	d.r.Flush()
	d.r.EndReread()
	d.r.fail(ErrReopen)
	d.openNext()
	d.release()
	d.waitResolved(50)
	requireInOrder(t, readTopic(t, stacktest.Brokers(t), topic), 10, 5)
}

// TestN04_DeposedOwnerWritesNothing: after a takeover Kafka rejects the records of the previous
// owner.
func TestN04_DeposedOwnerWritesNothing(t *testing.T) {
	t.Parallel()
	topic := stacktest.Topic(t, 3)
	txid, c := "outrelay.test."+topic, &claims{}
	first := takeOver(t, txid, c)
	for i := range 30 {
		first.send(t, newRecord(topic, fmt.Sprint("k", i%6), fmt.Sprintf("k%d/%d", i%6, i/6)))
	}
	first.Flush()
	first.acks.waitResolved(30)

	second := takeOver(t, txid, c)
	if n := len(second.keeper.session.Quarantined()); n != 0 {
		t.Fatalf("%d partitions are in quarantine on a healthy cluster, want none", n)
	}

	// The first owner is alive and has not seen the takeover.
	for k := range 6 {
		x := newRecord(topic, fmt.Sprint("k", k), "zombie")
		_ = first.Send(&x, record.Ticket(1000+k))
	}
	first.Flush()
	if err := first.waitEnded(t); !errors.Is(err, ErrFenced) {
		t.Fatalf("the deposed owner ended with %v, want ErrFenced", err)
	}

	for i := range 60 {
		second.send(t, newRecord(topic, fmt.Sprint("k", i%6), fmt.Sprintf("k%d/%d", i%6, i/6)))
	}
	second.Flush()
	second.acks.waitResolved(60)
	requireInOrder(t, readTopic(t, stacktest.Brokers(t), topic), 6, 10)
}

// TestKeepAliveLeavesSequencesAlone: keep-alive markers between batches do not disturb their
// sequences.
func TestKeepAliveLeavesSequencesAlone(t *testing.T) {
	t.Parallel()
	topic := stacktest.Topic(t, 2)
	r := openSink(t, sinkOptions{})
	for i := range 20 {
		r.send(t, newRecord(topic, fmt.Sprint("k", i%4), fmt.Sprintf("k/%d", i/4)))
		r.Flush()
		if i%5 != 4 {
			continue
		}

		r.mu.Lock()
		if len(r.topics[topic].partitions) == 2 {
			r.topics[topic].partitions[i/5%2].lastUsed = time.Now().Add(-r.keeper.expiry.IdleAfter() - time.Second)
		}
		r.mu.Unlock()
		if _, err := r.keeper.keepAlive(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	r.acks.waitResolved(20)
	requireInOrder(t, readTopic(t, stacktest.Brokers(t), topic), 4, 5)
}

// TestN10_NothingOfAKeyIsSkippedAfterOneWasSent: that holds in a compacted topic. In any other
// topic no single record of a key disappears, so records that are in the topic are not sent again.
func TestN10_NothingOfAKeyIsSkippedAfterOneWasSent(t *testing.T) {
	t.Parallel()
	for policy, want := range map[string][]string{
		"compact":        {"a2", "b1", "a1", "a2"},
		"compact,delete": {"a2", "b1", "a1", "a2"},
		"delete":         {"a2", "b1", "a1"},
	} {
		t.Run(policy, func(t *testing.T) {
			t.Parallel()
			topic := stacktest.Name(t)
			stacktest.CreateTopic(t, topic, 1, kafka.ConfigEntry{ConfigName: "cleanup.policy", ConfigValue: policy})
			txid, c := "outrelay.test."+topic, &claims{}
			first := takeOver(t, txid, c)

			// As if compaction had removed a1: only a2 and b1 are left of the records that were sent.
			first.send(t, newRecord(topic, "a", "a2"))
			first.send(t, newRecord(topic, "b", "b1"))
			first.Flush()
			first.acks.waitResolved(2)
			if err := first.kill(); err != nil {
				t.Fatal(err)
			}

			second := takeOver(t, txid, c)
			second.send(t, newRecord(topic, "a", "a1"))
			// The record a2 is in the topic, but now it follows a1.
			second.send(t, newRecord(topic, "a", "a2"))
			second.send(t, newRecord(topic, "b", "b1"))
			second.Flush()
			second.acks.waitResolved(3)
			if got := valuesOf(readTopic(t, stacktest.Brokers(t), topic))[0]; !slices.Equal(got, want) {
				t.Fatalf("the log is %v, want %v", got, want)
			}
		})
	}
}

// TestQuarantinedPartitionWaitsAloneAndSkipsItsRecords: the records of a partition in quarantine
// wait. When it can be read, the sink ends, at most once in reopenEvery. The next one acks the
// records that its read-back has found, and sends the others.
func TestQuarantinedPartitionWaitsAloneAndSkipsItsRecords(t *testing.T) {
	t.Parallel()
	topic := stacktest.Topic(t, 2)
	txid, c := "outrelay.test."+topic, &claims{}
	first := takeOver(t, txid, c)
	send := func(r *testSink, n int) {
		for i := range n {
			for p := range int32(2) {
				x := newRecord(topic, fmt.Sprint("k", p), fmt.Sprintf("k%d/%d", p, i))
				x.Partition = p
				r.send(t, x)
			}
		}
		r.Flush()
	}

	send(first, 5)
	first.acks.waitResolved(10)
	if err := first.kill(); err != nil {
		t.Fatal(err)
	}

	second := openSink(t, sinkOptions{txid: txid, claims: c, noRun: true})
	// As if partition 1 could not be read at the takeover.
	second.mu.Lock()
	p := second.topics[topic].partitions[1]
	p.topic.hitsLeft -= p.hits.Len()
	p.quarantine, p.hits = true, nil
	p.setObstacle(obstacle{kindQuarantined, "sick", ""}, time.Now())
	second.mu.Unlock()

	second.run(t)
	send(second, 8)
	second.acks.waitUntil(testTimeout, "the healthy partition flows", func() bool { return len(second.acks.acked) == 8 })
	state := second.State()
	if len(state) != 1 || state[0].Partition != 1 || state[0].Records != 8 || state[0].Kind != kindQuarantined {
		t.Fatalf("state %+v, want 8 quarantined records of partition 1", state)
	}

	// As if the partition could be read now, soon after another takeover and later.
	second.EndReread()
	k := &keeper{sink: second.Sink, session: second.keeper.session, readable: 1}
	second.c.takeReopen(time.Now())
	if err := k.readQuarantine(t.Context()); err != nil {
		t.Fatalf("the sink would end with %v, want it to wait", err)
	}
	second.c.reopened.Store(nil)
	err := k.readQuarantine(t.Context())
	if !errors.Is(err, ErrReopen) {
		t.Fatalf("the sink would end with %v, want ErrReopen", err)
	}
	second.fail(err)
	if err := second.waitEnded(t); !errors.Is(err, ErrReopen) {
		t.Fatalf("the sink ended with %v, want ErrReopen", err)
	}

	third := takeOver(t, txid, c)
	send(third, 8)
	third.acks.waitResolved(16)
	requireInOrder(t, readTopic(t, stacktest.Brokers(t), topic), 2, 8)
}

// Kafka's words name the topic with which a name collides. Its code does not.
func TestKafkasWordsAreShown(t *testing.T) {
	t.Parallel()
	name := stacktest.Name(t)
	stacktest.CreateTopic(t, name+".a_b", 1)
	d := openWithHolder(t, sinkOptions{cfg: testConfig{Create: &kafkawire.TopicCreate{Partitions: 1}, ParkAfter: time.Hour}})
	if _, err := d.send(newRecord(name+".a.b", "k", "1")); err != nil {
		t.Fatal(err)
	}
	stacktest.Eventually(t, "the reason", func() bool {
		state := d.r.State()
		return len(state) == 1 && strings.Contains(state[0].Reason(), "collides with existing topic") && strings.Contains(state[0].Reason(), name+".a_b")
	})
}
