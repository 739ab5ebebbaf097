package sink

import (
	"bytes"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/relay/internal/fence"
)

// openSuccessor sends n records of one key to a topic of one partition, kills the sink, and returns
// the sink of the next owner, which does not run yet. The test has to send all records again.
func openSuccessor(t *testing.T, n int) (r *testSink, topic string) {
	t.Helper()
	topic = stacktest.Topic(t, 1)
	txid, c := "outrelay.test."+topic, &claims{}

	first := takeOver(t, txid, c)
	for i := range n {
		first.send(t, newRecord(topic, "k", fmt.Sprintf("k/%d", i)))
	}
	first.Flush()
	first.acks.waitResolved(n)
	if err := first.kill(); err != nil {
		t.Fatal(err)
	}

	return openSink(t, sinkOptions{txid: txid, claims: c, noRun: true}), topic
}

// sendSequence sends the records with the numbers from (inclusive) to to (exclusive) of the key k.
func (r *testSink) sendSequence(t *testing.T, topic string, from, to int) {
	t.Helper()
	for i := from; i < to; i++ {
		r.send(t, newRecord(topic, "k", fmt.Sprintf("k/%d", i)))
	}
	r.Flush()
}

// quarantineOnly puts the only partition of the topic into quarantine, as if the takeover could
// not read it. It returns the partition and its hits.
func (r *testSink) quarantineOnly(topic string) (*partition, *fence.Known) {
	r.mu.Lock()
	defer r.mu.Unlock()
	p := r.topics[topic].partitions[0]
	hits := p.hits
	p.topic.hitsLeft -= hits.Len()
	p.quarantine, p.hits = true, nil
	p.setObstacle(obstacle{kindQuarantined, "sick", ""}, time.Now())
	return p, hits
}

// requireHitsDropped checks that nothing of the reread is left.
func (r *testSink) requireHitsDropped(t *testing.T, topic string) {
	t.Helper()
	r.mu.Lock()
	defer r.mu.Unlock()
	top := r.topics[topic]
	if top.hitsLeft != 0 || top.sentKeys != nil || top.allKeysSent {
		t.Errorf("%d hits and %d keys are left of the reread, want 0", top.hitsLeft, len(top.sentKeys))
	}

	for _, p := range top.partitions {
		if p.hits != nil {
			t.Errorf("partition %d has %d hits, want none", p.tp.Partition, p.hits.Len())
		}
	}
}

// TestN08_SideDeliveriesAreFlaggedAfterTheReread: a part of the partition was not read back. An envelope that an earlier owner may have
// sent out of the store may be in that part, whenever it is sent again. An event that follows the takeover cannot.
func TestN08_SideDeliveriesAreFlaggedAfterTheReread(t *testing.T) {
	t.Parallel()
	r, topic := openSuccessor(t, 1)
	r.topics[topic].unread = true
	r.EndReread()
	r.requireHitsDropped(t, topic)

	side := newRecord(topic, "k", "side")
	r.acks.mu.Lock()
	r.acks.bytes += r.Size(&side)
	r.acks.mu.Unlock()
	if err := r.Send(&side, record.Side|1); err != nil {
		t.Fatal(err)
	}
	r.sendSequence(t, topic, 1, 2)
	r.run(t)
	r.acks.waitResolved(2)

	got := map[string]bool{}
	for _, x := range readTopic(t, stacktest.Brokers(t), topic)[0] {
		got[string(x.Value)] = x.Headers[len(x.Headers)-1].Key == record.HeaderRedelivered
	}
	if want := map[string]bool{"k/0": false, "side": true, "k/1": false}; !maps.Equal(got, want) {
		t.Errorf("flagged: %v, want %v", got, want)
	}
}

// TestN08_RecordsOfAGrownTopicAreFlagged: the topic had one partition, a part of which was not read back. A record of the reread may be in
// that part although its key has another partition now, whether or not the stored offsets include the new partition.
func TestN08_RecordsOfAGrownTopicAreFlagged(t *testing.T) {
	t.Parallel()
	for name, stored := range map[string][]int64{"grown since": {1}, "growth stored": {1, 0}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			// The retention of the topic has removed records from the stored offset of the partition 0 on.
			topic := stacktest.Topic(t, 2)
			removeRecords(t, topic, 3)
			r := openSink(t, sinkOptions{claims: &claims{offsets: map[string][]int64{topic: stored}}})
			const keys = 8
			for i := range keys {
				r.send(t, newRecord(topic, fmt.Sprint("k", i), fmt.Sprint("event-", i)))
			}
			r.Flush()
			r.acks.waitResolved(keys)

			for partition, records := range readTopic(t, stacktest.Brokers(t), topic) {
				if len(records) == 0 {
					t.Errorf("partition %d has no records", partition)
				}
				for _, x := range records {
					if x.Headers[len(x.Headers)-1].Key != record.HeaderRedelivered {
						t.Errorf("%s in partition %d is not flagged", x.Value, partition)
					}
				}
			}
		})
	}
}

// removeRecords writes n records to the partition 0 of a topic, and removes them, as the retention does.
func removeRecords(t *testing.T, topic string, n int) {
	t.Helper()
	client, err := kgo.NewClient(kgo.SeedBrokers(stacktest.Brokers(t)...), kgo.RecordPartitioner(kgo.ManualPartitioner()))
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	for range n {
		if err := client.ProduceSync(t.Context(), &kgo.Record{Topic: topic, Partition: 0, Value: []byte("removed")}).FirstErr(); err != nil {
			t.Fatal(err)
		}
	}
	before := kadm.Offsets{}
	before.Add(kadm.Offset{Topic: topic, Partition: 0, At: int64(n)})
	if _, err := kadm.NewClient(client).DeleteRecords(t.Context(), before); err != nil {
		t.Fatal(err)
	}
}

// TestN08_ATopicThatWasCreatedAgainFlagsTheKeysOfItsPartitionsOnly: the log ends before the stored offset, so it is another one.
func TestN08_ATopicThatWasCreatedAgainFlagsTheKeysOfItsPartitionsOnly(t *testing.T) {
	t.Parallel()
	topic := stacktest.Topic(t, 2)
	r := openSink(t, sinkOptions{claims: &claims{offsets: map[string][]int64{topic: {1000, 0}}}})
	for i := range 8 {
		r.send(t, newRecord(topic, fmt.Sprint("k", i), fmt.Sprint("event-", i)))
	}
	r.Flush()
	r.acks.waitResolved(8)

	for partition, records := range readTopic(t, stacktest.Brokers(t), topic) {
		for _, x := range records {
			if isFlagged := x.Headers[len(x.Headers)-1].Key == record.HeaderRedelivered; isFlagged != (partition == 0) {
				t.Errorf("%s in partition %d: flagged %t", x.Value, partition, isFlagged)
			}
		}
	}
}

func TestN08_OffsetsStayBelowRecordsThatAreNotClaimed(t *testing.T) {
	t.Parallel()
	next, topic := openSuccessor(t, 2)
	check := func(when string, want bool) {
		t.Helper()
		if holds := next.acks.offsetHolds.Swap(0) > 0; holds != want {
			t.Errorf("%s: offsets are held: %t", when, holds)
		}
	}
	next.send(t, newRecord(topic, "k", "k/0"))
	check("a record that was sent", false)

	// Kafka had rejected this record, so the previous owner sent the next one without it.
	next.send(t, newRecord(topic, "k", "k/rejected"))
	check("a record that was not sent although a later one was", true)
	next.send(t, newRecord(topic, "k", "k/1"))
	next.send(t, newRecord(topic, "k", "k/2"))
	check("a new record", false)
}

// TestN10_KeysThatWereSentAreBounded: beyond the bound no record of any key is skipped. That is
// safe, and the records get the redelivered header.
func TestN10_KeysThatWereSentAreBounded(t *testing.T) {
	t.Parallel()
	r, topic := openSuccessor(t, 4)
	top := r.topics[topic]
	r.sendSequence(t, topic, 0, 1) // found

	r.mu.Lock()
	top.compacted = true
	top.sentKeys = map[sentKey]struct{}{}
	for i := range maxSentKeys - 1 {
		top.sentKeys[sentKey{key: fmt.Sprint("other-", i)}] = struct{}{}
	}
	r.mu.Unlock()
	r.sendSequence(t, topic, 1, 2) // found

	r.send(t, newRecord(topic, "new", "new/0"))
	x := newRecord(topic, "keyless", "keyless")
	x.Key = nil
	r.send(t, x)
	if top.sentKeys != nil {
		t.Errorf("%d keys are kept, want none", len(top.sentKeys))
	}

	// These records are in the topic, but the sink no longer has the proof that no record of k was
	// sent since.
	r.sendSequence(t, topic, 2, 4)
	r.EndReread()
	r.sendSequence(t, topic, 4, 5)
	r.run(t)
	r.acks.waitResolved(7)

	var got []string
	for _, g := range readTopic(t, stacktest.Brokers(t), topic)[0] {
		v := string(g.Value)
		if g.Headers[len(g.Headers)-1].Key == string(redeliveredHeader.Key) {
			v += " again"
		}
		got = append(got, v)
	}
	want := []string{"k/0", "k/1", "k/2", "k/3", "new/0 again", "keyless again", "k/2 again", "k/3 again", "k/4"}
	if !slices.Equal(got, want) {
		t.Errorf("the log is %v, want %v", got, want)
	}
	r.requireHitsDropped(t, topic)
}

// TestN10_IsNotAboutDeliveriesOutsideOfTheStream: a scheduled or replayed envelope that is sent
// during a reread has no place in the order of its key. Stream records of the key that are in the
// topic are found all the same.
func TestN10_IsNotAboutDeliveriesOutsideOfTheStream(t *testing.T) {
	t.Parallel()
	r, topic := openSuccessor(t, 4)
	x := newRecord(topic, "k", "due")
	r.acks.mu.Lock()
	r.acks.bytes += r.Size(&x)
	r.acks.mu.Unlock()
	if err := r.Send(&x, record.Side|1); err != nil {
		t.Fatal(err)
	}

	r.sendSequence(t, topic, 0, 4)
	r.EndReread()
	r.run(t)
	r.acks.waitResolved(5)
	if got := valuesOf(readTopic(t, stacktest.Brokers(t), topic))[0]; len(got) != 5 {
		t.Fatalf("the log is %v, want each record once", got)
	}
}

// TestN08_ALongReadBackIsReported: nothing is delivered during a takeover, so a long one shows in the log where it is.
func TestN08_ALongReadBackIsReported(t *testing.T) {
	t.Parallel()
	kc, brokers := newFakeCluster(t, kfake.NumBrokers(1), kfake.SeedTopics(1, "a"))
	const n = 12
	u := fakeOptions(brokers...)
	u.txid, u.cfg.Compression = "outrelay.test.a", "none"
	first := openSink(t, u)
	for i := range n {
		x := newRecord("a", "k", fmt.Sprintf("k/%d", i))
		x.Value = make([]byte, 600<<10)
		first.send(t, x)
		first.Flush()
		first.acks.waitResolved(i + 1)
	}
	_ = first.kill()

	// A fetch returns one batch.
	kc.ControlKey(int16(kmsg.Fetch), func(kmsg.Request) (kmsg.Response, error, bool) {
		kc.KeepControl()
		kc.SleepControl(func() { <-time.After(600 * time.Millisecond) })
		return nil, nil, false
	})
	var log bytes.Buffer
	u.cfg.Log, u.claims, u.noRun = slog.New(slog.NewTextHandler(&log, nil)), first.claims, true
	next := openSink(t, u)
	if got := next.topics["a"].hitsLeft; got != n {
		t.Errorf("%d records were read back, want %d; in quarantine: %v", got, n, next.keeper.session.Quarantined())
	}
	if c := strings.Count(log.String(), "reading back what earlier owners sent: 1 of 1 partitions"); c != 1 {
		t.Errorf("%d lines about the read-back in this log:\n%s", c, &log)
	}
}
