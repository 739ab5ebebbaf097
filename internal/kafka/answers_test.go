package kafka

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	dto "github.com/prometheus/client_model/go"
	"github.com/segmentio/kafka-go"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/outrelay/outrelay/internal/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/kafka/batch"
	"github.com/outrelay/outrelay/internal/record"
)

func onFake(brokers ...string) setUp {
	return setUp{cfg: Config{Brokers: brokers, RequestTimeout: time.Second}}
}

func TestEveryCodeHasAVerdict(t *testing.T) {
	t.Parallel()
	for code, want := range map[kafka.Error]verdict{
		0: acked, 46: acked,
		5: again, 6: again, 7: again, 8: again, 13: again, 19: again, 20: again, 56: again, -1: again,
		10: split, 18: split, 87: records, 32: records, 2: corrupt,
		3: refused, 17: refused, 29: refused, 44: refused, 76: refused, 999: refused,
		47: fenced, 90: fenced, 45: broken, 49: broken, 59: broken,
	} {
		if got := classify(code); got != want {
			t.Errorf("%d: verdict %d, want %d", code, got, want)
		}
	}
}

func TestRetriableAnswersAreRetriedWithTheSameBytes(t *testing.T) {
	t.Parallel()
	for _, e := range []*kerr.Error{
		kerr.LeaderNotAvailable, kerr.NotLeaderForPartition, kerr.RequestTimedOut, kerr.NotEnoughReplicas,
		kerr.NotEnoughReplicasAfterAppend, kerr.UnknownTopicOrPartition, kerr.CorruptMessage, kerr.KafkaStorageError,
	} {
		t.Run(e.Message, func(t *testing.T) {
			t.Parallel()
			kc, brokers := fake(t, kfake.NumBrokers(2), kfake.SeedTopics(2, "a"))
			kc.Fault(kfake.Fault{Keys: []kmsg.Key{kmsg.Produce}, Topic: "a", Err: e, Count: 3})
			r := open(t, onFake(brokers...))
			for i := range 60 {
				r.send(t, rec("a", fmt.Sprint("k", i%6), fmt.Sprintf("k/%d", i/6)))
				if i%6 == 5 {
					r.Flush()
				}
			}
			r.acks.resolved(60)
			inOrder(t, read(t, brokers, "a"), 6, 10)
		})
	}
}

func TestForbiddenTopicHoldsItselfAlone(t *testing.T) {
	t.Parallel()
	kc, brokers := fake(t, kfake.NumBrokers(1), kfake.SeedTopics(1, "a", "b"))
	var on atomic.Bool
	on.Store(true)
	kc.Fault(kfake.Fault{Keys: []kmsg.Key{kmsg.Produce}, Topic: "a", Err: kerr.TopicAuthorizationFailed, Count: -1, When: func(kmsg.Request) bool { return on.Load() }})
	r := open(t, onFake(brokers...))
	for i := range 20 {
		r.send(t, rec("a", "k", fmt.Sprintf("k/%d", i)))
		r.send(t, rec("b", "k", fmt.Sprintf("k/%d", i)))
		r.Flush()
	}
	r.acks.until(patient, "the other topic flows", func() bool { return len(r.acks.acked) == 20 })
	until(t, "the reason is told", func() bool {
		for _, b := range r.State() {
			if b.Topic == "a" && b.Kind == kindForbidden && strings.Contains(b.Reason, "WRITE") && b.Count == 20 {
				return true
			}
		}
		return false
	})
	on.Store(false)
	r.acks.resolved(40)
	until(t, "nothing is blocked", func() bool { return len(r.State()) == 0 })
	inOrder(t, read(t, brokers, "a"), 1, 20)
}

func TestFencedAndBrokenEndTheSink(t *testing.T) {
	t.Parallel()
	for e, want := range map[*kerr.Error]error{
		kerr.InvalidProducerEpoch: ErrFenced, kerr.ProducerFenced: ErrFenced,
		kerr.OutOfOrderSequenceNumber: ErrBroken, kerr.UnknownProducerID: ErrBroken, kerr.InvalidProducerIDMapping: ErrBroken,
	} {
		t.Run(e.Message, func(t *testing.T) {
			t.Parallel()
			kc, brokers := fake(t, kfake.NumBrokers(1), kfake.SeedTopics(1, "a"))
			kc.Fault(kfake.Fault{Keys: []kmsg.Key{kmsg.Produce}, Topic: "a", Err: e, Count: 1})
			r := open(t, onFake(brokers...))
			r.send(t, rec("a", "k", "1"))
			r.Flush()
			if err := r.end(t); !errors.Is(err, want) {
				t.Fatalf("the sink ended with %v, want %v", err, want)
			}
			x := rec("a", "k", "2")
			if err := r.Send(&x, 99); !errors.Is(err, want) {
				t.Fatalf("Send after the end: %v, want %v", err, want)
			}
			if err := r.Drain(t.Context()); !errors.Is(err, want) {
				t.Fatalf("Drain after the end: %v, want %v", err, want)
			}
			if len(r.acks.acked) != 0 {
				t.Fatal("a record was acked without an answer")
			}
		})
	}
}

func TestNamedRecordsAreRefusedTheRestIsSent(t *testing.T) {
	t.Parallel()
	topic := stacktest.Name(t)
	stacktest.CreateTopic(t, topic, 1, kafka.ConfigEntry{ConfigName: "cleanup.policy", ConfigValue: "compact"})
	r := open(t, setUp{})
	bad := map[record.Ticket]bool{}
	n := 0
	for i := range 300 {
		x := rec(topic, "k", fmt.Sprintf("k/%d", n))
		if i%100 == 50 { // a compacted topic takes no record without a key: 87, with all of them named
			x = rec(topic, "", fmt.Sprint("id-", i))
			x.Key = nil
			x.Headers = append(x.Headers, record.Header{Key: []byte("outrelay-ns"), Value: []byte("12345678")})
		} else {
			n++
		}
		k := r.send(t, x)
		if x.Key == nil {
			bad[k] = true
		}
	}
	r.Flush()
	r.acks.resolved(300)
	if len(r.acks.refused) != 3 {
		t.Fatalf("%d records were refused, want 3", len(r.acks.refused))
	}
	for k, why := range r.acks.refused {
		if !bad[k] || why.Class != record.RecordRefused || !strings.HasPrefix(string(why.ID), "id-") || string(why.NS) != "12345678" {
			t.Errorf("ticket %d: %+v", k, why)
		}
	}
	inOrder(t, read(t, stacktest.Brokers(t), topic), 1, 297)
}

func TestTooLargeIsSplitAndOnlyTheLargeOneRefused(t *testing.T) {
	t.Parallel()
	for _, codec := range []string{"none", "gzip"} {
		t.Run(codec, func(t *testing.T) {
			t.Parallel()
			// The fake does not tell max.message.bytes by DescribeConfigs below, so only its answers decide.
			kc, brokers := fake(t, kfake.NumBrokers(1), kfake.SeedTopics(1, "a"), kfake.BrokerConfigs(map[string]string{"message.max.bytes": "3000"}))
			kc.ControlKey(int16(kmsg.DescribeConfigs), func(req kmsg.Request) (kmsg.Response, error, bool) {
				kc.KeepControl()
				return req.ResponseKind(), nil, true
			})
			u := onFake(brokers...)
			u.cfg.Compression = codec
			r := open(t, u)
			for i := range 100 {
				x := rec("a", "k", fmt.Sprintf("k/%d", i-i/50)) // the one that is refused leaves no hole in the count
				if i == 50 {
					x.Value = noise(5000)
				}
				if i > 50 {
					x.Value = []byte(fmt.Sprintf("k/%d", i-1))
				}
				r.send(t, x)
			}
			r.Flush()
			r.acks.resolved(100)
			why := r.acks.refused[50]
			if len(r.acks.refused) != 1 || why == nil || why.Class != record.MessageTooLarge || !strings.Contains(why.Reason, "bytes") {
				t.Fatalf("refused %v", r.acks.refused)
			}
			inOrder(t, read(t, brokers, "a"), 1, 99)
		})
	}
}

// noise does not compress.
func noise(n int) []byte {
	b := make([]byte, n)
	x := uint64(88172645463325252)
	for i := range b {
		x ^= x << 13
		x ^= x >> 7
		x ^= x << 17
		b[i] = byte(x >> 32)
	}
	return b
}

// alone is the length of a batch that holds nothing else.
func alone(rec *record.Record) int {
	var b batch.Builder
	b.Reset(nil)
	b.Append(rec)
	return b.Len()
}

// Kafka has the last word on the limit of a topic: it may be raised at any time. What is cut below it is cut by what was read.
func TestTooLargeForTheTopicIsRefusedByTheLimitOfThatMoment(t *testing.T) {
	t.Parallel()
	topic := stacktest.Name(t)
	stacktest.CreateTopic(t, topic, 1, kafka.ConfigEntry{ConfigName: "max.message.bytes", ConfigValue: "2000"})
	r := open(t, setUp{})
	limit := func(want int) {
		t.Helper()
		until(t, fmt.Sprintf("a limit of %d is known", want), func() bool {
			r.mu.Lock()
			defer r.mu.Unlock()
			return r.topics[topic].max == want && r.topics[topic].limit == want
		})
	}
	fits := rec(topic, "k", "")
	for alone(&fits) < 2000 {
		fits.Value = make([]byte, len(fits.Value)+1)
	}
	r.send(t, fits)
	r.acks.resolved(1) // the topic is adopted
	limit(2000)
	if len(r.acks.refused) != 0 {
		t.Fatalf("a record that fits to the byte was refused: %v", r.acks.refused[0])
	}
	for i := range 200 { // batches are cut below the limit
		r.send(t, rec(topic, "k", fmt.Sprintf("k/%d", i)))
	}
	r.Flush()
	r.acks.resolved(201)
	answers := func() float64 {
		var tooLarge dto.Metric
		if err := r.client.cfg.Metrics.ProduceErrors.WithLabelValues(kafka.MessageSizeTooLarge.Title()).Write(&tooLarge); err != nil {
			t.Fatal(err)
		}
		return tooLarge.GetCounter().GetValue()
	}
	if answers() != 0 {
		t.Error("a batch was refused; it should have been cut below the limit")
	}
	large := fits
	large.Value = make([]byte, len(fits.Value)+1)
	r.send(t, large)
	r.Flush()
	r.acks.resolved(202)
	why := r.acks.refused[201]
	if why == nil || why.Class != record.MessageTooLarge || !strings.Contains(why.Reason, "2001") || !strings.Contains(why.Reason, "2000") {
		t.Fatalf("one byte more: %v", why)
	}
	if answers() != 1 {
		t.Errorf("%v batches were refused", answers())
	}

	_, err := admin(t).IncrementalAlterConfigs(t.Context(), &kafka.IncrementalAlterConfigsRequest{Resources: []kafka.IncrementalAlterConfigsRequestResource{{
		ResourceType: kafka.ResourceTypeTopic, ResourceName: topic,
		Configs: []kafka.IncrementalAlterConfigsRequestConfig{{Name: "max.message.bytes", Value: "300000"}},
	}}})
	if err != nil {
		t.Fatal(err)
	}
	r.send(t, large)
	r.Flush()
	r.acks.resolved(203)
	if len(r.acks.refused) != 1 {
		t.Fatalf("refused by a limit of the past: %v", r.acks.refused)
	}
	limit(300000)
}

func TestLostAnswerMayHaveArrived(t *testing.T) {
	t.Parallel()
	kc, brokers := fake(t, kfake.NumBrokers(1), kfake.SeedTopics(1, "a"))
	var lose atomic.Bool
	lose.Store(true)
	kc.ControlKey(int16(kmsg.Produce), func(kmsg.Request) (kmsg.Response, error, bool) {
		kc.KeepControl()
		if lose.Load() {
			return nil, errors.New("the connection is closed"), true
		}
		return nil, nil, false
	})
	r := open(t, onFake(brokers...))
	r.send(t, rec("a", "k", "k/0"))
	until(t, "the batch counts as one that may stand", func() bool {
		r.mu.Lock()
		defer r.mu.Unlock()
		top := r.topics["a"]
		return len(top.parts) == 1 && top.parts[0].mayStand()
	})
	lose.Store(false)
	r.acks.resolved(1)
	inOrder(t, read(t, brokers, "a"), 1, 1)
}

func TestPartitionOutOfRange(t *testing.T) {
	t.Parallel()
	topic := stacktest.Topic(t, 2)
	r := open(t, setUp{})
	x := rec(topic, "k", "held")
	x.Partition = 5
	r.send(t, x) // the topic is not adopted yet: refused when it is
	y := rec(topic, "k", "fine")
	y.Partition = 1
	r.send(t, y)
	r.acks.resolved(2)
	if why := r.acks.refused[0]; why == nil || why.Class != record.PartitionOutOfRange || string(why.ID) != "held" {
		t.Fatalf("refused %+v", r.acks.refused)
	}
	if at := r.acks.acked[1]; at.tp.Partition != 1 {
		t.Fatalf("acked in partition %d, want the one that was asked for", at.tp.Partition)
	}
	for _, p := range []int32{2, -2} {
		x.Partition = p
		if why, ok := errors.AsType[*record.Refusal](r.Send(&x, 9)); !ok || why.Class != record.PartitionOutOfRange || !strings.Contains(why.Reason, "has 2") {
			t.Fatalf("partition %d: %v", p, why)
		}
	}
}

func TestH02_TooOldForTheBrokerToRecogniseIsBroken(t *testing.T) {
	t.Parallel()
	kc, brokers := fake(t, kfake.NumBrokers(1), kfake.SeedTopics(1, "a"))
	kc.Fault(kfake.Fault{Keys: []kmsg.Key{kmsg.Produce}, Topic: "a", Err: kerr.NotEnoughReplicasAfterAppend, Count: -1})
	u := onFake(brokers...)
	u.noRun = true
	r := open(t, u)
	r.expiry.ProducerID = 200 * time.Millisecond
	r.run(t)
	r.send(t, rec("a", "k", "1"))
	r.Flush()
	if err := r.end(t); !errors.Is(err, ErrBroken) {
		t.Fatalf("ended with %v, want ErrBroken", err)
	}
}

func TestN02_NothingIsProducedWhileTheGateIsClosed(t *testing.T) {
	t.Parallel()
	kc, brokers := fake(t, kfake.NumBrokers(1), kfake.SeedTopics(1, "a"))
	var produced, looked atomic.Int64
	kc.ControlKey(int16(kmsg.Produce), func(kmsg.Request) (kmsg.Response, error, bool) {
		kc.KeepControl()
		produced.Add(1)
		return nil, nil, false
	})
	var valid atomic.Bool
	valid.Store(true)
	u := onFake(brokers...)
	u.gate = func() bool {
		looked.Add(1)
		return valid.Load()
	}
	r := open(t, u)
	r.send(t, rec("a", "k", "k/0"))
	r.acks.resolved(1)
	valid.Store(false)
	before, sent := looked.Load(), produced.Load()
	r.send(t, rec("a", "k", "k/1"))
	r.Flush()
	until(t, "the lane looks at the gate", func() bool { return looked.Load() > before+5 })
	if n := produced.Load() - sent; n != 0 {
		t.Fatalf("%d requests while the lease was not valid", n)
	}
	valid.Store(true)
	r.acks.resolved(2)
}

func TestAckIsTheOffsetOfADuplicate(t *testing.T) {
	t.Parallel()
	// The first answer is lost: the broker has appended, and answers the second request as it did the first.
	kc, brokers := fake(t, kfake.NumBrokers(1), kfake.SeedTopics(1, "a"))
	kc.Fault(kfake.Fault{Keys: []kmsg.Key{kmsg.Produce}, Topic: "a", Err: kerr.RequestTimedOut, Count: 1})
	r := open(t, onFake(brokers...))
	r.send(t, rec("a", "k", "k/0"))
	r.acks.resolved(1)
	r.send(t, rec("a", "k", "k/1"))
	r.Flush()
	r.acks.resolved(2)
	if a, b := r.acks.acked[0].off, r.acks.acked[1].off; a != b-1 {
		t.Fatalf("acked at %d and %d", a, b)
	}
	inOrder(t, read(t, brokers, "a"), 1, 2)
}

func TestDrainWaitsForAllOfIt(t *testing.T) {
	t.Parallel()
	topic := stacktest.Topic(t, 2)
	r := open(t, setUp{})
	for i := range 100 {
		r.send(t, rec(topic, fmt.Sprint("k", i%5), fmt.Sprintf("k/%d", i/5)))
	}
	if err := r.Drain(t.Context()); err != nil {
		t.Fatal(err)
	}
	if len(r.acks.acked) != 100 {
		t.Fatalf("%d records are acked after Drain, want all 100", len(r.acks.acked))
	}
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	r.send(t, rec("missing."+topic, "k", "1"))
	if err := r.Drain(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("Drain with a missing topic: %v", err)
	}
}
