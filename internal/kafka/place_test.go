package kafka

import (
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
)

func TestALeaderThatComesBackIsFoundSoonByWhatWaits(t *testing.T) {
	t.Parallel()
	_, brokers := fake(t, kfake.NumBrokers(1), kfake.SeedTopics(1, "a"))
	r := open(t, onFake(brokers...))
	r.send(t, rec("a", "k", "k/0"))
	r.acks.resolved(1)
	mostly(t, r, metadataEvery/2, func(i int) {
		r.applyLayout(&Layout{Topics: map[string]TopicLayout{"a": {Partitions: []PartitionLayout{{Leader: -1}}}}})
		if i == 1 && len(r.troubledTopics(time.Now())) > 0 {
			t.Error("metadata are asked for although nothing waits")
		}
	})
	inOrder(t, read(t, brokers, "a"), 1, 6)
}

// mostly sends a record five times, each after leaders have changed, and fails unless most of them are acknowledged within the bound: a
// machine may stand still once or twice. r has sent one record of topic a before.
func mostly(t *testing.T, r *rig, within time.Duration, change func(i int)) {
	t.Helper()
	var took []time.Duration
	for i := 1; i <= 5; i++ {
		change(i)
		begin := time.Now()
		r.send(t, rec("a", "k", fmt.Sprintf("k/%d", i)))
		r.Flush()
		r.acks.resolved(i + 1)
		took = append(took, time.Since(begin))
	}
	slices.Sort(took)
	if took[2] > within {
		t.Errorf("leaders were found again after %s; they are looked for every %s anyway", took, metadataEvery)
	}
}

// A broker is cut off from the others, but not from us. It goes on naming itself as the leader, and takes records that it can
// never replicate.
func TestBrokerThatIsCutOffIsNotTakenForTheLeader(t *testing.T) {
	t.Parallel()
	kc, brokers := fake(t, kfake.NumBrokers(3), kfake.SeedTopics(1, "a"))
	if err := kc.MoveTopicPartition("a", 0, 0); err != nil {
		t.Fatal(err)
	}
	u := onFake(brokers[0])
	u.cfg.RequestTimeout = 10 * time.Second
	r := open(t, u)
	r.send(t, rec("a", "k", "k/0"))
	r.acks.resolved(1)
	var old kmsg.MetadataResponse // of the broker that is cut off
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
		b.Host, b.Port = hostPort(t, addr)
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
		return refuseAll(req, kerr.RequestTimedOut), nil, true
	})
	if err := kc.MoveTopicPartition("a", 0, 1); err != nil {
		t.Fatal(err)
	}
	for i := 1; i <= 5; i++ {
		r.send(t, rec("a", "k", fmt.Sprintf("k/%d", i)))
		r.Flush()
		r.acks.resolved(i + 1)
	}
	for range 20 { // whoever is asked
		if layout, err := r.client.Metadata(t.Context(), []string{"a"}); err == nil {
			r.applyLayout(layout)
		}
		r.mu.Lock()
		leader := r.topics["a"].partitions[0].leader
		r.mu.Unlock()
		if leader != 1 {
			t.Fatalf("broker %d is taken for the leader", leader)
		}
	}
	inOrder(t, read(t, brokers[1:], "a"), 1, 6)
}

// A topic that was deleted and created again begins with lower epochs.
func TestLowerEpochCountsWhereTheTopicWasAway(t *testing.T) {
	t.Parallel()
	_, brokers := fake(t, kfake.NumBrokers(2), kfake.SeedTopics(1, "a"))
	r := open(t, onFake(brokers...))
	r.send(t, rec("a", "k", "k/0"))
	r.acks.resolved(1)
	see := func(of TopicLayout) int32 {
		r.applyLayout(&Layout{Topics: map[string]TopicLayout{"a": of}})
		r.mu.Lock()
		defer r.mu.Unlock()
		return r.topics["a"].partitions[0].leader
	}
	led := func(by, epoch int32) TopicLayout {
		return TopicLayout{Partitions: []PartitionLayout{{Leader: by, Epoch: epoch}}}
	}
	if see(led(1, 1000)) != 1 || see(led(0, 999)) != 1 || see(led(0, 1001)) != 0 {
		t.Error("the higher epoch does not count")
	}
	if see(TopicLayout{Err: kafka.UnknownTopicOrPartition}) != -1 || see(led(1, 0)) != 1 {
		t.Error("the epochs of a topic that was deleted count for its successor")
	}
}

// refuseAll is a reply to a produce request with one error for all partitions.
func refuseAll(req kmsg.Request, e *kerr.Error) kmsg.Response {
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

func hostPort(t *testing.T, addr string) (string, int32) {
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

// Kafka replies to a produce request when all of its partitions are done. One whose replica hangs takes the whole time-out of each
// request.
func TestPartitionThatTimesOutDoesNotHoldBackItsBroker(t *testing.T) {
	t.Parallel()
	kc, brokers := fake(t, kfake.NumBrokers(1), kfake.SeedTopics(1, "stuck", "fine"))
	const hang = slowRequest + slowRequest/5
	r := open(t, setUp{cfg: Config{Brokers: brokers, RequestTimeout: 10 * time.Second}})
	r.send(t, rec("stuck", "k", "k/0"))
	r.send(t, rec("fine", "k", "k/0"))
	r.Flush()
	r.acks.resolved(2)
	var hangs atomic.Int32
	var over atomic.Bool
	kc.ControlKey(int16(kmsg.Produce), func(req kmsg.Request) (kmsg.Response, error, bool) {
		kc.KeepControl()
		stuck := slices.ContainsFunc(req.(*kmsg.ProduceRequest).Topics, func(t kmsg.ProduceRequestTopic) bool { return t.Topic == "stuck" })
		if !stuck || over.Load() {
			return nil, nil, false
		}
		hangs.Add(1)
		kc.SleepControl(func() { <-time.After(hang) })
		return refuseAll(req, kerr.RequestTimedOut), nil, true
	})
	r.send(t, rec("stuck", "k", "k/1"))
	r.Flush()
	var waited time.Duration
	for i := range 3 {
		before := hangs.Load()
		until(t, "the partition hangs once more", func() bool { return hangs.Load() > max(before, 1) })
		begin := time.Now()
		r.send(t, rec("fine", "k", fmt.Sprintf("k/%d", 1+i)))
		r.Flush()
		r.acks.until(patient, "it is acknowledged", func() bool { return len(r.acks.acked) == 3+i })
		waited += time.Since(begin)
	}
	if waited > hang {
		t.Errorf("three records of another partition took %s; each request of the one that hangs takes %s", waited, hang)
	}
	over.Store(true)
	r.acks.resolved(6)
	inOrder(t, read(t, brokers, "stuck"), 1, 2)
}

// A topic that is short of replicas has the right leader: no other topic is asked for because of it.
func TestRefusedTopicAsksForItsOwnMetadataAlone(t *testing.T) {
	t.Parallel()
	kc, brokers := fake(t, kfake.NumBrokers(1), kfake.SeedTopics(1, "short", "fine"))
	r := open(t, onFake(brokers...))
	r.send(t, rec("short", "k", "k/0"))
	r.send(t, rec("fine", "k", "k/0"))
	r.Flush()
	r.acks.resolved(2)
	var refused, all, own atomic.Int32
	kc.Fault(kfake.Fault{Keys: []kmsg.Key{kmsg.Produce}, Topic: "short", Err: kerr.NotEnoughReplicas, Count: -1, When: func(kmsg.Request) bool {
		refused.Add(1)
		return true
	}})
	kc.ControlKey(int16(kmsg.Metadata), func(req kmsg.Request) (kmsg.Response, error, bool) {
		kc.KeepControl()
		if refused.Load() == 0 {
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
	r.send(t, rec("short", "k", "k/1"))
	r.Flush()
	until(t, "it is refused again and again", func() bool { return refused.Load() > 20 })
	took := time.Since(begin)
	if most := 1 + int32(took/metadataEvery); all.Load() > most {
		t.Errorf("all topics were asked for %d times within %s", all.Load(), took)
	}
	if most := 2 + int32(took/troubledEvery); own.Load() > most {
		t.Errorf("the topic was asked for %d times within %s", own.Load(), took)
	}
}
