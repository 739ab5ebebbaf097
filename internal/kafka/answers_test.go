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

// TestEveryCodeHasAVerdict says of every code with which Kafka answers a produce request, and of some with which it does not,
// what becomes of the batch, and whether it may be in the log all the same.
func TestEveryCodeHasAVerdict(t *testing.T) {
	t.Parallel()
	const appended, not = true, false
	for code, want := range map[kafka.Error]struct {
		verdict verdict
		stands  bool
		why     string
	}{
		-1:  {verdictRetry, appended, "an exception that nobody expected, before the append or behind it"},
		5:   {verdictRetry, appended, "no answer of Kafka to a produce request"},
		6:   {verdictRetry, appended, "the leader has moved; DelayedProduce ends with it when the batch waits for followers"},
		7:   {verdictRetry, appended, "the followers did not get the batch in time"},
		8:   {verdictRetry, appended, "no answer of Kafka to a produce request"},
		9:   {verdictRetry, appended, "no answer of Kafka to a produce request"},
		13:  {verdictRetry, appended, "the connection was lost, somewhere on the way"},
		20:  {verdictRetry, appended, "appended, and the in-sync replicas became too few"},
		56:  {verdictRetry, appended, "the disk failed while the batch was written, or behind it"},
		74:  {verdictRetry, appended, "no answer of Kafka to a produce request"},
		89:  {verdictRetry, appended, "no answer of Kafka to a produce request"},
		19:  {verdictRetry, not, "Partition.appendRecordsToLeader counts the in-sync replicas first"},
		10:  {verdictTooLarge, not, "UnifiedLog looks at the size before it appends"},
		18:  {verdictTooLarge, not, "UnifiedLog looks at the size before it appends"},
		87:  {verdictBadRecords, not, "LogValidator refuses the whole batch"},
		32:  {verdictBadRecords, not, "LogValidator refuses the whole batch"},
		2:   {verdictCorrupt, not, "the checksum is looked at before the append"},
		3:   {verdictRefused, not, "the broker does not know the topic, or it was deleted with its log"},
		17:  {verdictRefused, not, "KafkaApis does not pass the partition on"},
		21:  {verdictRefused, not, "ReplicaManager looks at acks first"},
		29:  {verdictRefused, not, "KafkaApis does not pass the partition on"},
		31:  {verdictRefused, not, "KafkaApis does not pass the request on"},
		35:  {verdictRefused, not, "the request was not read"},
		42:  {verdictRefused, not, "the request is not valid"},
		43:  {verdictRefused, not, "the request is not valid"},
		53:  {verdictRefused, not, "KafkaApis does not pass the request on"},
		76:  {verdictRefused, not, "the request is not valid"},
		44:  {verdictRefused, appended, "no answer of Kafka to a produce request"},
		999: {verdictRefused, appended, "a code of tomorrow"},
		47:  {verdictFenced, appended, "ends the term"}, 90: {verdictFenced, appended, "ends the term"},
		45: {verdictBroken, appended, "ends the term"}, 49: {verdictBroken, appended, "ends the term"}, 59: {verdictBroken, appended, "ends the term"},
	} {
		if got := classify(code); got != want.verdict {
			t.Errorf("%d: verdict %d, want %d (%s)", code, got, want.verdict, want.why)
		}
		if got := mayBeAppended(code); got != want.stands {
			t.Errorf("%d: may stand %t, want %t: %s", code, got, want.stands, want.why)
		}
	}
	for _, code := range []kafka.Error{0, 46} {
		if classify(code) != verdictAcked {
			t.Errorf("%d is no success", code)
		}
	}
}

// TestABatchThatMayStandIsNotDividedOrRefused: the answer to a later attempt says nothing about an earlier one, and no other
// record may take the sequence. What a take-over reads decides.
func TestABatchThatMayStandIsNotDividedOrRefused(t *testing.T) {
	t.Parallel()
	for _, e := range []*kerr.Error{kerr.MessageTooLarge, kerr.InvalidRecord, kerr.InvalidTimestamp, kerr.CorruptMessage} {
		t.Run(e.Message, func(t *testing.T) {
			t.Parallel()
			kc, brokers := fake(t, kfake.NumBrokers(1), kfake.SeedTopics(1, "a"))
			txid, c := "outrelay.test.a", &claims{}
			d := sit(t, setUp{cfg: Config{Brokers: brokers, RequestTimeout: time.Second}, txid: txid, claims: c})
			d.sequence("a", 0, 1)
			d.answered(1)
			kc.Fault(kfake.Fault{Keys: []kmsg.Key{kmsg.Produce}, Topic: "a", Err: kerr.NotEnoughReplicasAfterAppend, Count: 1})
			var tries atomic.Int32
			count := 1
			if e == kerr.CorruptMessage {
				count = corruptTries
			}
			kc.Fault(kfake.Fault{Keys: []kmsg.Key{kmsg.Produce}, Topic: "a", Err: e, Count: count, When: func(kmsg.Request) bool { return tries.Add(1) > 1 }})
			d.sequence("a", 1, 2)
			if err := d.r.end(t); !errors.Is(err, ErrBroken) {
				t.Fatalf("the sink ended with %v", err)
			}
			second := open(t, setUp{cfg: Config{Brokers: brokers}, txid: txid, claims: c})
			second.sequence(t, "a", 0, 3)
			second.acks.resolved(3)
			inOrder(t, read(t, brokers, "a"), 1, 3)
		})
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
			return r.topics[topic].maxBytes == want && r.topics[topic].batchLimit == want
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
	until(t, "a record is taken by the new limit", func() bool { // which takes Kafka a moment
		r.send(t, large)
		r.Flush()
		r.acks.resolved(int(r.next))
		return len(r.acks.acked) > 201
	})
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
		return len(top.partitions) == 1 && top.partitions[0].queue[0].maybeAppended
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
