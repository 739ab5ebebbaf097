package sink

import (
	"errors"
	"fmt"
	"net"
	"slices"
	"strconv"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"github.com/outrelay/outrelay/internal/kafkawire"
	"github.com/segmentio/kafka-go"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
)

// TestWaitingRecordsFindAReturningLeaderSoon: if records wait for a leader, the sink does not
// wait for the regular metadata request.
func TestWaitingRecordsFindAReturningLeaderSoon(t *testing.T) {
	t.Parallel()
	_, brokers := newFakeCluster(t, kfake.NumBrokers(1), kfake.SeedTopics(1, "a"))
	r := openSink(t, fakeOptions(brokers...))
	r.send(t, newRecord("a", "k", "k/0"))
	r.acks.waitResolved(1)

	requireMostlyWithin(t, r, metadataEvery/2, func(i int) {
		r.refresher.applyLayout(&kafkawire.Layout{Topics: map[string]kafkawire.TopicLayout{"a": {Partitions: []kafkawire.PartitionLayout{{Leader: -1}}}}})
		if i == 1 && len(r.refresher.troubledTopics(time.Now())) > 0 {
			t.Error("the topic counts as troubled although nothing waits")
		}
	})
	requireInOrder(t, readTopic(t, brokers, "a"), 1, 6)
}

// requireMostlyWithin sends a record five times, each time after change. The test fails unless most
// of them are acked within the bound: a slow machine may miss it once or twice. r must have sent
// one record of topic a before.
func requireMostlyWithin(t *testing.T, r *testSink, within time.Duration, change func(i int)) {
	t.Helper()
	var took []time.Duration
	for i := 1; i <= 5; i++ {
		change(i)
		begin := time.Now()
		r.send(t, newRecord("a", "k", fmt.Sprintf("k/%d", i)))
		r.Flush()
		r.acks.waitResolved(i + 1)

		took = append(took, time.Since(begin))
	}
	slices.Sort(took)
	if took[2] > within {
		t.Errorf("leaders were found again after %s, want mostly below %s", took, within)
	}
}

// TestBrokerThatIsCutOffIsNotTakenForTheLeader: a broker is cut off from the others, but not from
// the sink. It continues to name itself as the leader, and accepts records that it can never
// replicate.
func TestBrokerThatIsCutOffIsNotTakenForTheLeader(t *testing.T) {
	t.Parallel()
	kc, brokers := newFakeCluster(t, kfake.NumBrokers(3), kfake.SeedTopics(1, "a"))
	if err := kc.MoveTopicPartition("a", 0, 0); err != nil {
		t.Fatal(err)
	}
	u := fakeOptions(brokers[0])
	u.cfg.RequestTimeout = 10 * time.Second
	r := openSink(t, u)
	r.send(t, newRecord("a", "k", "k/0"))
	r.acks.waitResolved(1)

	// old is the response of the broker that is cut off.
	var old kmsg.MetadataResponse
	kc.ControlKey(int16(kmsg.Metadata), func(req kmsg.Request) (kmsg.Response, error, bool) {
		kc.KeepControl()
		if kc.CurrentNode() != 0 {
			return nil, nil, false
		}
		resp := req.ResponseKind().(*kmsg.MetadataResponse)
		resp.Brokers, resp.Topics = old.Brokers, old.Topics
		return resp, nil, true
	})

	for id, addr := range kc.ListenAddrs() {
		b := kmsg.NewMetadataResponseBroker()
		b.NodeID = int32(id)
		b.Host, b.Port = splitHostPort(t, addr)
		old.Brokers = append(old.Brokers, b)
	}
	r.mu.Lock()
	part := kmsg.NewMetadataResponseTopicPartition()
	part.LeaderEpoch = r.topics["a"].partitions[0].leaderEpoch
	r.mu.Unlock()
	topic := kmsg.NewMetadataResponseTopic()
	topic.Topic = kmsg.StringPtr("a")
	topic.Partitions = append(topic.Partitions, part)
	old.Topics = append(old.Topics, topic)

	kc.ControlKey(int16(kmsg.Produce), func(req kmsg.Request) (kmsg.Response, error, bool) {
		kc.KeepControl()
		if kc.CurrentNode() != 0 {
			return nil, nil, false
		}
		return produceError(req, kerr.RequestTimedOut), nil, true
	})
	if err := kc.MoveTopicPartition("a", 0, 1); err != nil {
		t.Fatal(err)
	}
	for i := 1; i <= 5; i++ {
		r.send(t, newRecord("a", "k", fmt.Sprintf("k/%d", i)))
		r.Flush()
		r.acks.waitResolved(i + 1)
	}

	// Whichever broker responds.
	for range 20 {
		if layout, err := r.opener.kafka.Metadata(t.Context(), []string{"a"}); err == nil {
			r.refresher.applyLayout(layout)
		}
		r.mu.Lock()
		leader := r.topics["a"].partitions[0].leader
		r.mu.Unlock()
		if leader != 1 {
			t.Fatalf("broker %d counts as the leader, want 1", leader)
		}
	}
	requireInOrder(t, readTopic(t, brokers[1:], "a"), 1, 6)
}

// TestLowerEpochCountsWhereTheTopicWasAway: a topic that was deleted and created again begins with
// lower epochs.
func TestLowerEpochCountsWhereTheTopicWasAway(t *testing.T) {
	t.Parallel()
	_, brokers := newFakeCluster(t, kfake.NumBrokers(2), kfake.SeedTopics(1, "a"))
	r := openSink(t, fakeOptions(brokers...))
	r.send(t, newRecord("a", "k", "k/0"))
	r.acks.waitResolved(1)

	leaderAfter := func(of kafkawire.TopicLayout) int32 {
		r.refresher.applyLayout(&kafkawire.Layout{Topics: map[string]kafkawire.TopicLayout{"a": of}})
		r.mu.Lock()
		defer r.mu.Unlock()
		return r.topics["a"].partitions[0].leader
	}

	layoutOf := func(leader, epoch int32) kafkawire.TopicLayout {
		return kafkawire.TopicLayout{Partitions: []kafkawire.PartitionLayout{{Leader: leader, Epoch: epoch}}}
	}

	if leaderAfter(layoutOf(1, 1000)) != 1 || leaderAfter(layoutOf(0, 999)) != 1 || leaderAfter(layoutOf(0, 1001)) != 0 {
		t.Error("a leader with a lower epoch counts, or one with a higher epoch does not")
	}
	if leaderAfter(kafkawire.TopicLayout{Err: kafka.UnknownTopicOrPartition}) != -1 || leaderAfter(layoutOf(1, 0)) != 1 {
		t.Error("the epochs of a deleted topic count for the new topic of the name")
	}
}

// produceError returns a response to a produce request with one error for all partitions.
func produceError(req kmsg.Request, e *kerr.Error) kmsg.Response {
	resp := req.ResponseKind().(*kmsg.ProduceResponse)
	for _, t := range req.(*kmsg.ProduceRequest).Topics {
		rt := kmsg.NewProduceResponseTopic()
		rt.Topic = t.Topic
		for _, p := range t.Partitions {
			rp := kmsg.NewProduceResponseTopicPartition()
			rp.Partition, rp.ErrorCode = p.Partition, e.Code
			rt.Partitions = append(rt.Partitions, rp)
		}
		resp.Topics = append(resp.Topics, rt)
	}
	return resp
}

func splitHostPort(t *testing.T, addr string) (string, int32) {
	t.Helper()
	host, port, err := net.SplitHostPort(addr)
	if err != nil {
		t.Fatal(err)
	}
	n, err := strconv.ParseInt(port, 10, 32)
	if err != nil {
		t.Fatal(err)
	}
	return host, int32(n)
}

// TestPartitionThatTimesOutDoesNotHoldBackItsBroker: Kafka responds to a produce request when all
// of its partitions are done. A partition whose replica hangs takes the whole timeout of each
// request.
func TestPartitionThatTimesOutDoesNotHoldBackItsBroker(t *testing.T) {
	t.Parallel()
	kc, brokers := newFakeCluster(t, kfake.NumBrokers(1), kfake.SeedTopics(1, "stuck", "fine"))
	const hang = slowRequest + slowRequest/5
	r := openSink(t, sinkOptions{cfg: testConfig{Brokers: brokers, RequestTimeout: testTimeout}})
	r.send(t, newRecord("stuck", "k", "k/0"))
	r.send(t, newRecord("fine", "k", "k/0"))
	r.Flush()
	r.acks.waitResolved(2)

	// The first request ends late, which moves the partition to another loop. The next one lasts until the others are acked.
	var hangs atomic.Int32
	var over atomic.Bool
	acked := make(chan struct{})
	kc.ControlKey(int16(kmsg.Produce), func(req kmsg.Request) (kmsg.Response, error, bool) {
		kc.KeepControl()
		topics := req.(*kmsg.ProduceRequest).Topics
		stuck := slices.ContainsFunc(topics, func(t kmsg.ProduceRequestTopic) bool { return t.Topic == "stuck" })
		if !stuck || over.Load() {
			return nil, nil, false
		}
		n := hangs.Add(1)
		kc.SleepControl(func() {
			<-time.After(hang)
			if n > 1 {
				<-acked
			}
		})
		return produceError(req, kerr.RequestTimedOut), nil, true
	})

	r.send(t, newRecord("stuck", "k", "k/1"))
	r.Flush()
	stacktest.Eventually(t, "the partition hangs once more", func() bool { return hangs.Load() == 2 })
	for i := range 3 {
		r.send(t, newRecord("fine", "k", fmt.Sprintf("k/%d", 1+i)))
		r.Flush()
		r.acks.waitUntil(testTimeout, "the other record is acked", func() bool { return len(r.acks.acked) == 3+i })
	}
	if n := hangs.Load(); n != 2 {
		t.Errorf("three records of another partition waited for the end of %d requests that hang", n-2)
	}

	over.Store(true)
	close(acked)
	r.acks.waitResolved(6)
	requireInOrder(t, readTopic(t, brokers, "stuck"), 1, 2)
}

// TestRejectedTopicAsksForItsOwnMetadataAlone: a topic that has too few replicas has the right
// leader. So the sink does not read the metadata of other topics because of it.
func TestRejectedTopicAsksForItsOwnMetadataAlone(t *testing.T) {
	t.Parallel()
	kc, brokers := newFakeCluster(t, kfake.NumBrokers(1), kfake.SeedTopics(1, "short", "fine"))
	r := openSink(t, fakeOptions(brokers...))
	r.send(t, newRecord("short", "k", "k/0"))
	r.send(t, newRecord("fine", "k", "k/0"))
	r.Flush()
	r.acks.waitResolved(2)

	var rejected, all, own atomic.Int32
	kc.Fault(kfake.Fault{
		Keys:  []kmsg.Key{kmsg.Produce},
		Topic: "short",
		Err:   kerr.NotEnoughReplicas,
		Count: -1,
		When: func(kmsg.Request) bool {
			rejected.Add(1)
			return true
		},
	})
	kc.ControlKey(int16(kmsg.Metadata), func(req kmsg.Request) (kmsg.Response, error, bool) {
		kc.KeepControl()
		if rejected.Load() == 0 {
			return nil, nil, false
		}
		names := req.(*kmsg.MetadataRequest).Topics
		switch {
		case len(names) == 1 && *names[0].Topic == "short":
			own.Add(1)
		case len(names) > 1:
			all.Add(1)
		}
		return nil, nil, false
	})

	begin := time.Now()
	r.send(t, newRecord("short", "k", "k/1"))
	r.Flush()
	stacktest.Eventually(t, "the record is rejected 20 times", func() bool { return rejected.Load() > 20 })
	took := time.Since(begin)

	if most := 1 + int32(took/metadataEvery); all.Load() > most {
		t.Errorf("%d metadata requests for all topics within %s, want at most %d", all.Load(), took, most)
	}
	if most := 2 + int32(took/troubledEvery); own.Load() > most {
		t.Errorf("%d metadata requests for the topic within %s, want at most %d", own.Load(), took, most)
	}
}

// reopensAfter reports whether the sink has ended, to be opened again, once it has applied layout.
func (r *testSink) reopensAfter(layout *kafkawire.Layout) bool {
	r.refresher.applyLayout(layout)
	r.mu.Lock()
	defer r.mu.Unlock()
	return errors.Is(r.Sink.ended, ErrReopen)
}

// TestManyDeletedTopicsEndTheSink: the takeover of the next sink forgets them. A topic for which records wait, which is in quarantine, or
// which exists, does not count. The sink ends at most once in reopenEvery.
func TestManyDeletedTopicsEndTheSink(t *testing.T) {
	t.Parallel()
	r := openSink(t, sinkOptions{noRun: true})
	r.opener.limits.deletedTopics = 3
	layout := &kafkawire.Layout{Topics: map[string]kafkawire.TopicLayout{}}
	add := func(name string) *partition {
		r.mu.Lock()
		defer r.mu.Unlock()
		topic := r.findOrAddTopicLocked(name)
		topic.addPartitions(1)
		layout.Topics[name] = kafkawire.TopicLayout{Err: kafkawire.UnknownTopicOrPartition}
		return topic.partitions[0]
	}

	for _, name := range []string{"deleted1", "deleted2"} {
		add(name)
	}
	add("queued").queue = []*pending{{}}
	add("parked").parked = true
	add("quarantine").quarantine = true
	add("exists")
	layout.Topics["exists"] = kafkawire.TopicLayout{Partitions: []kafkawire.PartitionLayout{{}}}
	if r.reopensAfter(layout) {
		t.Fatal("the sink ends for two deleted topics, want three")
	}

	add("deleted3")
	r.c.takeReopen(time.Now())
	if r.reopensAfter(layout) {
		t.Fatal("the sink ends again within reopenEvery")
	}
	r.c.reopened.Store(nil)
	if !r.reopensAfter(layout) {
		t.Error("the sink does not end for three deleted topics")
	}
}

// TestAClockThatIsSetBackDelaysNoReadBack: the time between two ends on purpose is that of the monotonic clock.
func TestAClockThatIsSetBackDelaysNoReadBack(t *testing.T) {
	t.Parallel()
	opener, before := newOpener(t, testConfig{}), time.Now()
	after := before.Add(opener.limits.reopenEvery)
	// The seconds of the wall clock are above the 30 bits of the nanoseconds, and apart from the monotonic clock.
	const nanosecondBits = 30
	*(*uint64)(unsafe.Pointer(&after)) -= 3600 << nanosecondBits
	if step := before.Round(0).Sub(after.Round(0)); step < 50*time.Minute {
		t.Fatalf("the clock is set back by %s, want nearly an hour", step)
	}

	if !opener.takeReopen(before) || !opener.takeReopen(after) {
		t.Error("the sink may not end after the clock was set back")
	}
}

// TestATopicThatWasDeletedLongAgoEndsTheSink: one is enough then.
func TestATopicThatWasDeletedLongAgoEndsTheSink(t *testing.T) {
	t.Parallel()
	r := openSink(t, sinkOptions{noRun: true})
	r.mu.Lock()
	topic := r.findOrAddTopicLocked("deleted")
	topic.addPartitions(1)
	r.mu.Unlock()
	layout := &kafkawire.Layout{Topics: map[string]kafkawire.TopicLayout{"deleted": {Err: kafkawire.UnknownTopicOrPartition}}}
	if r.reopensAfter(layout) {
		t.Fatal("the sink ends at once")
	}

	r.mu.Lock()
	topic.since = topic.since.Add(-r.c.limits.deletedFor)
	r.mu.Unlock()
	if !r.reopensAfter(layout) {
		t.Error("the sink does not end a day later")
	}
}
