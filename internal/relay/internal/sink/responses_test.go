package sink

import (
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

	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/kafkawire"
	"github.com/outrelay/outrelay/internal/kafkawire/batch"
	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
)

// fakeOptions returns options for a fake cluster, whose requests time out after a second.
func fakeOptions(brokers ...string) sinkOptions {
	return sinkOptions{cfg: testConfig{Brokers: brokers, RequestTimeout: time.Second}}
}

// TestEveryCodeHasAVerdict lists every code that Kafka uses in the response to a produce request,
// and some that it does not use. It checks the verdict for the batch, and whether the batch may be
// in the log anyway.
func TestEveryCodeHasAVerdict(t *testing.T) {
	t.Parallel()
	const appended, not = true, false
	for code, want := range map[kafka.Error]struct {
		verdict kafkawire.Verdict
		// maybe is set if the batch may be in the log.
		maybe bool
		why   string
	}{
		-1:  {kafkawire.VerdictRetry, appended, "an unexpected exception, before or after the append"},
		5:   {kafkawire.VerdictRetry, appended, "Kafka does not use it for a produce request"},
		6:   {kafkawire.VerdictRetry, appended, "the leader has moved; DelayedProduce uses it while the batch waits for followers"},
		7:   {kafkawire.VerdictRetry, appended, "the followers did not get the batch in time"},
		8:   {kafkawire.VerdictRetry, appended, "Kafka does not use it for a produce request"},
		9:   {kafkawire.VerdictRetry, appended, "Kafka does not use it for a produce request"},
		13:  {kafkawire.VerdictRetry, appended, "the connection was lost at some point"},
		20:  {kafkawire.VerdictRetry, appended, "appended, and the in-sync replicas became too few"},
		56:  {kafkawire.VerdictRetry, appended, "the disk failed while the batch was written, or later"},
		74:  {kafkawire.VerdictRetry, appended, "Kafka does not use it for a produce request"},
		89:  {kafkawire.VerdictRetry, appended, "Kafka does not use it for a produce request"},
		19:  {kafkawire.VerdictRetry, not, "Partition.appendRecordsToLeader counts the in-sync replicas first"},
		10:  {kafkawire.VerdictTooLarge, not, "UnifiedLog checks the size before it appends"},
		18:  {kafkawire.VerdictTooLarge, not, "UnifiedLog checks the size before it appends"},
		87:  {kafkawire.VerdictBadRecords, not, "LogValidator rejects the whole batch"},
		32:  {kafkawire.VerdictBadRecords, not, "LogValidator rejects the whole batch"},
		2:   {kafkawire.VerdictCorrupt, not, "the checksum is checked before the append"},
		3:   {kafkawire.VerdictRejected, not, "the broker does not have the topic, or it was deleted with its log"},
		17:  {kafkawire.VerdictRejected, not, "KafkaApis does not pass the partition on"},
		21:  {kafkawire.VerdictRejected, not, "ReplicaManager checks acks first"},
		29:  {kafkawire.VerdictRejected, not, "KafkaApis does not pass the partition on"},
		31:  {kafkawire.VerdictRejected, not, "KafkaApis does not pass the request on"},
		35:  {kafkawire.VerdictRejected, not, "the request was not read"},
		42:  {kafkawire.VerdictRejected, not, "the request is not valid"},
		43:  {kafkawire.VerdictRejected, not, "the request is not valid"},
		53:  {kafkawire.VerdictRejected, not, "KafkaApis does not pass the request on"},
		76:  {kafkawire.VerdictRejected, not, "the request is not valid"},
		44:  {kafkawire.VerdictRejected, appended, "Kafka does not use it for a produce request"},
		999: {kafkawire.VerdictRejected, appended, "a code of a future version"},
		47:  {kafkawire.VerdictFenced, appended, "ends the term"},
		90:  {kafkawire.VerdictFenced, appended, "ends the term"},
		45:  {kafkawire.VerdictBroken, appended, "ends the term"},
		49:  {kafkawire.VerdictBroken, appended, "ends the term"},
		59:  {kafkawire.VerdictBroken, appended, "ends the term"},
	} {
		if got := kafkawire.Classify(code); got != want.verdict {
			t.Errorf("%d: verdict %d, want %d (%s)", code, got, want.verdict, want.why)
		}
		if got := kafkawire.MayBeAppended(code); got != want.maybe {
			t.Errorf("%d: mayBeAppended is %t, want %t (%s)", code, got, want.maybe, want.why)
		}
	}

	for _, code := range []kafka.Error{0, 46} {
		if kafkawire.Classify(code) != kafkawire.VerdictAcked {
			t.Errorf("%d: verdict %d, want kafkawire.VerdictAcked", code, kafkawire.Classify(code))
		}
	}
}

// TestABatchThatMayStandIsNotDividedOrRejected: the response to a later attempt does not show
// whether an earlier one was appended, and no other record may use the sequence. So the sink ends,
// and the read-back of the next one decides.
func TestABatchThatMayStandIsNotDividedOrRejected(t *testing.T) {
	t.Parallel()
	for _, e := range []*kerr.Error{kerr.MessageTooLarge, kerr.InvalidRecord, kerr.InvalidTimestamp, kerr.CorruptMessage} {
		t.Run(e.Message, func(t *testing.T) {
			t.Parallel()
			kc, brokers := newFakeCluster(t, kfake.NumBrokers(1), kfake.SeedTopics(1, "a"))
			txid, c := "outrelay.test.a", &claims{}
			u := fakeOptions(brokers...)
			u.txid, u.claims = txid, c
			d := openWithHolder(t, u)
			d.sendSequence("a", 0, 1)
			d.waitResolved(1)

			kc.Fault(kfake.Fault{Keys: []kmsg.Key{kmsg.Produce}, Topic: "a", Err: kerr.NotEnoughReplicasAfterAppend, Count: 1})
			var tries atomic.Int32
			count := 1
			if e == kerr.CorruptMessage {
				count = corruptTries
			}
			kc.Fault(kfake.Fault{
				Keys:  []kmsg.Key{kmsg.Produce},
				Topic: "a",
				Err:   e,
				Count: count,
				When:  func(kmsg.Request) bool { return tries.Add(1) > 1 },
			})
			d.sendSequence("a", 1, 2)
			if err := d.r.waitEnded(t); !errors.Is(err, ErrBroken) {
				t.Fatalf("the sink ended with %v, want ErrBroken", err)
			}

			second := openSink(t, sinkOptions{cfg: testConfig{Brokers: brokers}, txid: txid, claims: c})
			second.sendSequence(t, "a", 0, 3)
			second.acks.waitResolved(3)
			requireInOrder(t, readTopic(t, brokers, "a"), 1, 3)
		})
	}
}

// TestRetriableResponsesAreRetriedWithTheSameBytes: after three errors each record is in the log
// once, in order.
func TestRetriableResponsesAreRetriedWithTheSameBytes(t *testing.T) {
	t.Parallel()
	for _, e := range []*kerr.Error{
		kerr.LeaderNotAvailable, kerr.NotLeaderForPartition, kerr.RequestTimedOut, kerr.NotEnoughReplicas,
		kerr.NotEnoughReplicasAfterAppend, kerr.UnknownTopicOrPartition, kerr.CorruptMessage, kerr.KafkaStorageError,
	} {
		t.Run(e.Message, func(t *testing.T) {
			t.Parallel()
			kc, brokers := newFakeCluster(t, kfake.NumBrokers(2), kfake.SeedTopics(2, "a"))
			kc.Fault(kfake.Fault{Keys: []kmsg.Key{kmsg.Produce}, Topic: "a", Err: e, Count: 3})

			r := openSink(t, fakeOptions(brokers...))
			for i := range 60 {
				r.send(t, newRecord("a", fmt.Sprint("k", i%6), fmt.Sprintf("k/%d", i/6)))
				if i%6 == 5 {
					r.Flush()
				}
			}

			r.acks.waitResolved(60)
			requireInOrder(t, readTopic(t, brokers, "a"), 6, 10)
		})
	}
}

// TestForbiddenTopicHoldsItselfAlone: the records of a forbidden topic wait, and State reports the
// missing permission. Another topic flows.
func TestForbiddenTopicHoldsItselfAlone(t *testing.T) {
	t.Parallel()
	kc, brokers := newFakeCluster(t, kfake.NumBrokers(1), kfake.SeedTopics(1, "a", "b"))
	var on atomic.Bool
	on.Store(true)
	kc.Fault(kfake.Fault{
		Keys:  []kmsg.Key{kmsg.Produce},
		Topic: "a",
		Err:   kerr.TopicAuthorizationFailed,
		Count: -1,
		When:  func(kmsg.Request) bool { return on.Load() },
	})

	r := openSink(t, fakeOptions(brokers...))
	for i := range 20 {
		r.send(t, newRecord("a", "k", fmt.Sprintf("k/%d", i)))
		r.send(t, newRecord("b", "k", fmt.Sprintf("k/%d", i)))
		r.Flush()
	}
	r.acks.waitUntil(testTimeout, "the other topic flows", func() bool { return len(r.acks.acked) == 20 })
	stacktest.Eventually(t, "State reports the reason", func() bool {
		for _, b := range r.State() {
			if b.Topic == "a" && b.Kind == kindForbidden && strings.Contains(b.Reason(), "WRITE") && b.Records == 20 {
				return true
			}
		}
		return false
	})

	on.Store(false)
	r.acks.waitResolved(40)

	stacktest.Eventually(t, "nothing is blocked", func() bool { return len(r.State()) == 0 })
	requireInOrder(t, readTopic(t, brokers, "a"), 1, 20)
}

// TestFencedAndBrokenEndTheSink: after such an error, Send returns it, and nothing is acked.
func TestFencedAndBrokenEndTheSink(t *testing.T) {
	t.Parallel()
	for e, want := range map[*kerr.Error]error{
		kerr.InvalidProducerEpoch: ErrFenced, kerr.ProducerFenced: ErrFenced,
		kerr.OutOfOrderSequenceNumber: ErrBroken, kerr.UnknownProducerID: ErrBroken, kerr.InvalidProducerIDMapping: ErrBroken,
	} {
		t.Run(e.Message, func(t *testing.T) {
			t.Parallel()
			kc, brokers := newFakeCluster(t, kfake.NumBrokers(1), kfake.SeedTopics(1, "a"))
			kc.Fault(kfake.Fault{Keys: []kmsg.Key{kmsg.Produce}, Topic: "a", Err: e, Count: 1})
			r := openSink(t, fakeOptions(brokers...))
			r.send(t, newRecord("a", "k", "1"))
			r.Flush()
			if err := r.waitEnded(t); !errors.Is(err, want) {
				t.Fatalf("the sink ended with %v, want %v", err, want)
			}

			x := newRecord("a", "k", "2")
			if err := r.Send(&x, 99); !errors.Is(err, want) {
				t.Fatalf("Send after the end returned %v, want %v", err, want)
			}
			if len(r.acks.acked) != 0 {
				t.Fatalf("%d records were acked without a response, want none", len(r.acks.acked))
			}
		})
	}
}

// TestNamedRecordsAreRejectedTheRestIsSent: if the broker names the bad records of a batch, only
// they are rejected.
func TestNamedRecordsAreRejectedTheRestIsSent(t *testing.T) {
	t.Parallel()
	topic := stacktest.Name(t)
	stacktest.CreateTopic(t, topic, 1, kafka.ConfigEntry{ConfigName: "cleanup.policy", ConfigValue: "compact"})
	r := openSink(t, sinkOptions{})
	bad := map[record.Ticket]bool{}
	n := 0
	for i := range 300 {
		x := newRecord(topic, "k", fmt.Sprintf("k/%d", n))
		// A compacted topic rejects records without a key. The response (87) names all of them.
		if i%100 == 50 {
			x = newRecord(topic, "", fmt.Sprint("id-", i))
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
	r.acks.waitResolved(300)
	if len(r.acks.rejected) != 3 {
		t.Fatalf("%d records were rejected, want 3", len(r.acks.rejected))
	}

	for k, why := range r.acks.rejected {
		identified := strings.HasPrefix(string(why.ID), "id-") && string(why.NS) == "12345678"
		if !bad[k] || why.Class != record.RecordRejected || !identified {
			t.Errorf("ticket %d: rejected with %+v", k, why)
		}
	}

	requireInOrder(t, readTopic(t, stacktest.Brokers(t), topic), 1, 297)
}

// TestTooLargeIsSplitAndOnlyTheLargeOneRejected: a batch that the broker finds too large is halved
// until the large record is alone.
func TestTooLargeIsSplitAndOnlyTheLargeOneRejected(t *testing.T) {
	t.Parallel()
	for _, codec := range []string{"none", "gzip"} {
		t.Run(codec, func(t *testing.T) {
			t.Parallel()
			// DescribeConfigs does not report max.message.bytes here, so only the responses decide.
			limits := kfake.BrokerConfigs(map[string]string{"message.max.bytes": "3000"})
			kc, brokers := newFakeCluster(t, kfake.NumBrokers(1), kfake.SeedTopics(1, "a"), limits)
			kc.ControlKey(int16(kmsg.DescribeConfigs), func(req kmsg.Request) (kmsg.Response, error, bool) {
				kc.KeepControl()
				return req.ResponseKind(), nil, true
			})

			u := fakeOptions(brokers...)
			u.cfg.Compression = codec
			r := openSink(t, u)
			for i := range 100 {
				// The rejected record leaves no hole in the numbers.
				x := newRecord("a", "k", fmt.Sprintf("k/%d", i-i/50))
				if i == 50 {
					x.Value = randomBytes(5000)
				}
				if i > 50 {
					x.Value = []byte(fmt.Sprintf("k/%d", i-1))
				}
				r.send(t, x)
			}
			r.Flush()
			r.acks.waitResolved(100)

			why := r.acks.rejected[50]
			if len(r.acks.rejected) != 1 || why == nil ||
				why.Class != record.MessageTooLarge || !strings.Contains(why.Reason, "bytes") {
				t.Fatalf("rejected %v, want only ticket 50 with MessageTooLarge", r.acks.rejected)
			}
			requireInOrder(t, readTopic(t, brokers, "a"), 1, 99)
		})
	}
}

// randomBytes returns n bytes that do not compress.
func randomBytes(n int) []byte {
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

// sizeAlone returns the length of a batch with only rec.
func sizeAlone(rec *record.Record) int {
	var b batch.Builder
	b.Reset(new(batch.Chunks))
	b.Append(rec)
	return b.Len()
}

// TestTooLargeForTheTopicIsRejectedByTheLimitOfThatMoment: the limit of a topic may be raised at any
// time, so only Kafka rejects records. The sink keeps batches below the limit that it has read.
func TestTooLargeForTheTopicIsRejectedByTheLimitOfThatMoment(t *testing.T) {
	t.Parallel()
	topic := stacktest.Name(t)
	stacktest.CreateTopic(t, topic, 1, kafka.ConfigEntry{ConfigName: "max.message.bytes", ConfigValue: "2000"})
	r := openSink(t, sinkOptions{})
	waitForLimit := func(want int) {
		t.Helper()
		stacktest.Eventually(t, fmt.Sprintf("a limit of %d is known", want), func() bool {
			r.mu.Lock()
			defer r.mu.Unlock()
			return r.topics[topic].maxBytes == want && r.topics[topic].batchLimit == want
		})
	}

	fits := newRecord(topic, "k", "")
	for sizeAlone(&fits) < 2000 {
		fits.Value = make([]byte, len(fits.Value)+1)
	}
	r.send(t, fits)
	r.acks.waitResolved(1) // the topic is open

	waitForLimit(2000)
	if len(r.acks.rejected) != 0 {
		t.Fatalf("a record that fits to the byte was rejected: %v", r.acks.rejected[0])
	}

	// Batches are cut below the limit.
	for i := range 200 {
		r.send(t, newRecord(topic, "k", fmt.Sprintf("k/%d", i)))
	}
	r.Flush()
	r.acks.waitResolved(201)

	errorCount := func() float64 {
		var tooLarge dto.Metric
		counter := r.opener.cfg.Metrics.ProduceErrors.WithLabelValues(kafka.MessageSizeTooLarge.Title())
		if err := counter.Write(&tooLarge); err != nil {
			t.Fatal(err)
		}
		return tooLarge.GetCounter().GetValue()
	}

	if n := errorCount(); n != 0 {
		t.Errorf("%v batches were rejected, want none: they are cut below the limit", n)
	}

	large := fits
	large.Value = make([]byte, len(fits.Value)+1)
	r.send(t, large)
	r.Flush()
	r.acks.waitResolved(202)

	why := r.acks.rejected[201]
	if why == nil || why.Class != record.MessageTooLarge ||
		!strings.Contains(why.Reason, "2001") || !strings.Contains(why.Reason, "2000") {
		t.Fatalf("a record of one byte more was rejected with %v", why)
	}
	if n := errorCount(); n != 1 {
		t.Errorf("%v batches were rejected, want 1", n)
	}

	raise := kafka.IncrementalAlterConfigsRequestResource{
		ResourceType: kafka.ResourceTypeTopic,
		ResourceName: topic,
		Configs:      []kafka.IncrementalAlterConfigsRequestConfig{{Name: "max.message.bytes", Value: "300000"}},
	}
	_, err := newAdmin(t).IncrementalAlterConfigs(t.Context(), &kafka.IncrementalAlterConfigsRequest{
		Resources: []kafka.IncrementalAlterConfigsRequestResource{raise},
	})
	if err != nil {
		t.Fatal(err)
	}

	// Kafka needs a moment to apply the new limit.
	stacktest.Eventually(t, "a record is accepted by the new limit", func() bool {
		r.send(t, large)
		r.Flush()
		r.acks.waitResolved(int(r.next))

		return len(r.acks.acked) > 201
	})
	waitForLimit(300000)
}

// TestABatchWithoutAResponseMayHaveArrived: after a lost response the batch may be in the log. It is sent again
// with the same bytes.
func TestABatchWithoutAResponseMayHaveArrived(t *testing.T) {
	t.Parallel()
	kc, brokers := newFakeCluster(t, kfake.NumBrokers(1), kfake.SeedTopics(1, "a"))
	var lose atomic.Bool
	lose.Store(true)
	kc.ControlKey(int16(kmsg.Produce), func(kmsg.Request) (kmsg.Response, error, bool) {
		kc.KeepControl()
		if lose.Load() {
			return nil, errors.New("the connection is closed"), true
		}
		return nil, nil, false
	})

	r := openSink(t, fakeOptions(brokers...))
	r.send(t, newRecord("a", "k", "k/0"))
	stacktest.Eventually(t, "the batch may be appended", func() bool {
		r.mu.Lock()
		defer r.mu.Unlock()
		top := r.topics["a"]
		return len(top.partitions) == 1 && top.partitions[0].queue[0].maybeAppended
	})
	lose.Store(false)
	r.acks.waitResolved(1)
	requireInOrder(t, readTopic(t, brokers, "a"), 1, 1)
}

// TestPartitionOutOfRange: a record for a partition that does not exist is rejected, also if it has
// waited for the topic.
func TestPartitionOutOfRange(t *testing.T) {
	t.Parallel()
	topic := stacktest.Topic(t, 2)
	r := openSink(t, sinkOptions{})
	x := newRecord(topic, "k", "held")
	x.Partition = 5
	// The sink rejects the record when it opens the topic.
	r.send(t, x)
	y := newRecord(topic, "k", "fine")
	y.Partition = 1
	r.send(t, y)
	r.acks.waitResolved(2)
	if why := r.acks.rejected[0]; why == nil || why.Class != record.PartitionOutOfRange || string(why.ID) != "held" {
		t.Fatalf("rejected %+v, want ticket 0 with PartitionOutOfRange", r.acks.rejected)
	}
	if at := r.acks.acked[1]; at.tp.Partition != 1 {
		t.Fatalf("acked in partition %d, want 1", at.tp.Partition)
	}

	for _, p := range []int32{2, -2} {
		x.Partition = p
		why, ok := errors.AsType[*record.Rejection](r.Send(&x, 9))
		if !ok || why.Class != record.PartitionOutOfRange || !strings.Contains(why.Reason, "has 2") {
			t.Fatalf("partition %d: rejected with %v, want PartitionOutOfRange", p, why)
		}
	}
}

// TestH02_TooOldForTheBrokerToRecogniseIsBroken: a batch without a definite response ends the sink
// before the broker forgets the producer.
func TestH02_TooOldForTheBrokerToRecogniseIsBroken(t *testing.T) {
	t.Parallel()
	kc, brokers := newFakeCluster(t, kfake.NumBrokers(1), kfake.SeedTopics(1, "a"))
	kc.Fault(kfake.Fault{Keys: []kmsg.Key{kmsg.Produce}, Topic: "a", Err: kerr.NotEnoughReplicasAfterAppend, Count: -1})

	u := fakeOptions(brokers...)
	u.noRun = true
	r := openSink(t, u)
	r.keeper.expiry.ProducerID = 200 * time.Millisecond
	r.run(t)

	r.send(t, newRecord("a", "k", "1"))
	r.Flush()
	if err := r.waitEnded(t); !errors.Is(err, ErrBroken) {
		t.Fatalf("ended with %v, want ErrBroken", err)
	}
}

// TestN02_NothingIsProducedWhileTheGateIsClosed: a loop waits while the lease is not valid.
func TestN02_NothingIsProducedWhileTheGateIsClosed(t *testing.T) {
	t.Parallel()
	kc, brokers := newFakeCluster(t, kfake.NumBrokers(1), kfake.SeedTopics(1, "a"))
	var produced, checks atomic.Int64
	kc.ControlKey(int16(kmsg.Produce), func(kmsg.Request) (kmsg.Response, error, bool) {
		kc.KeepControl()
		produced.Add(1)
		return nil, nil, false
	})
	var valid atomic.Bool
	valid.Store(true)
	u := fakeOptions(brokers...)
	u.gate = func() bool {
		checks.Add(1)
		return valid.Load()
	}

	r := openSink(t, u)
	r.send(t, newRecord("a", "k", "k/0"))
	r.acks.waitResolved(1)

	valid.Store(false)
	before, sent := checks.Load(), produced.Load()
	r.send(t, newRecord("a", "k", "k/1"))
	r.Flush()
	stacktest.Eventually(t, "the loop checks the gate", func() bool { return checks.Load() > before+5 })
	if n := produced.Load() - sent; n != 0 {
		t.Fatalf("%d requests were sent while the lease was not valid, want none", n)
	}

	valid.Store(true)
	r.acks.waitResolved(2)
}

// TestAckIsTheOffsetOfADuplicate: the first response is lost. The broker has appended the batch,
// and responds to the second request with the same offset.
func TestAckIsTheOffsetOfADuplicate(t *testing.T) {
	t.Parallel()
	kc, brokers := newFakeCluster(t, kfake.NumBrokers(1), kfake.SeedTopics(1, "a"))
	kc.Fault(kfake.Fault{Keys: []kmsg.Key{kmsg.Produce}, Topic: "a", Err: kerr.RequestTimedOut, Count: 1})
	r := openSink(t, fakeOptions(brokers...))
	r.send(t, newRecord("a", "k", "k/0"))
	r.acks.waitResolved(1)

	r.send(t, newRecord("a", "k", "k/1"))
	r.Flush()
	r.acks.waitResolved(2)
	if a, b := r.acks.acked[0].off, r.acks.acked[1].off; a != b-1 {
		t.Fatalf("acked at the offsets %d and %d, want consecutive ones", a, b)
	}
	requireInOrder(t, readTopic(t, brokers, "a"), 1, 2)
}
