package kafka

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
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
	"github.com/outrelay/outrelay/pkg/event"
)

func admin(tb testing.TB) *kafka.Client {
	tb.Helper()
	tr := &kafka.Transport{MetadataTTL: time.Second}
	tb.Cleanup(tr.CloseIdleConnections)
	return &kafka.Client{Addr: kafka.TCP(stacktest.Brokers(tb)...), Transport: tr, Timeout: patient / 2}
}

func TestN09_EndOffsetIsSavedBeforeTheFirstRecord(t *testing.T) {
	t.Parallel()
	topic := stacktest.Topic(t, 2)
	before := open(t, setUp{txid: "outrelay.other." + topic})
	for i := range 7 { // the topic is not empty: somebody else writes to it
		x := rec(topic, "k", fmt.Sprint("foreign-", i))
		x.Partition = 1
		before.send(t, x)
	}
	before.Flush()
	before.acks.resolved(7)

	c := &claims{fail: errors.New("the document cannot be written")}
	r := open0(t, c)
	for i := range 10 {
		r.send(t, rec(topic, "k", fmt.Sprintf("k/%d", i)))
	}
	r.Flush()
	until(t, "the topic waits for the write", func() bool {
		c.mu.Lock()
		defer c.mu.Unlock()
		return c.asked >= 3 // the sender's, and two of the offsets that did not work
	})
	if n := len(read(t, stacktest.Brokers(t), topic)[1]); n != 7 {
		t.Fatalf("%d records are in the topic before its offsets are saved, want the 7 foreign ones", n)
	}
	c.mu.Lock()
	c.fail = nil
	c.saved = func(offsets map[string][]int64) {
		if !slices.Equal(offsets[topic], []int64{0, 7}) {
			t.Errorf("saved %v, want 0 and 7", offsets[topic])
		}
		if len(r.acks.acked) != 0 {
			t.Error("acked before the offsets were saved")
		}
	}
	c.mu.Unlock()
	r.acks.resolved(10)
	for p, want := range []int64{0, 7} {
		tp := record.TopicPartition{Topic: topic, Partition: int32(p)}
		if got := r.acks.restored[tp]; !slices.Equal(got, []int64{want}) {
			t.Errorf("partition %d: restored %v, want %d", p, got, want)
		}
	}
	log := values(read(t, stacktest.Brokers(t), topic))
	p := int32(event.Murmur2([]byte("k"))&0x7fffffff) % 2
	got := slices.DeleteFunc(log[p], func(v string) bool { return strings.HasPrefix(v, "foreign") })
	if len(got) != 10 || got[0] != "k/0" || got[9] != "k/9" {
		t.Fatalf("in partition %d stand %v", p, got)
	}
}

// open0 opens a sink whose first save works: that of the sender.
func open0(t *testing.T, c *claims) *rig {
	t.Helper()
	fail := c.fail
	c.fail = nil
	r := open(t, setUp{claims: c, noRun: true})
	c.fail = fail
	r.run(t)
	return r
}

// TestN09_NothingIsSentBeforeAllEndsAreKnown: one partition cannot be asked for its end. What is stored for it would be 0, and
// a successor would read all of it.
func TestN09_NothingIsSentBeforeAllEndsAreKnown(t *testing.T) {
	t.Parallel()
	kc, brokers := fake(t, kfake.NumBrokers(1), kfake.SeedTopics(2, "a"), kfake.SeedTopics(1, "b"))
	var sick atomic.Bool
	sick.Store(true)
	kc.Fault(kfake.Fault{Keys: []kmsg.Key{kmsg.ListOffsets}, Topic: "a", Partitions: []int32{1}, Err: kerr.LeaderNotAvailable, Count: -1, When: func(kmsg.Request) bool { return sick.Load() }})
	r := open(t, onFake(brokers...))
	r.send(t, rec("b", "k", "k/0"))
	for i := range 6 {
		r.send(t, rec("a", fmt.Sprint("k", i), fmt.Sprintf("k%d/0", i)))
	}
	r.acks.until(patient, "the other topic flows", func() bool { return len(r.acks.acked) == 1 })
	until(t, "it is said what the topic waits for", func() bool {
		state := r.State()
		return len(state) == 1 && state[0].Topic == "a" && state[0].Kind == kindNoLeader && state[0].Count == 6
	})
	if _, offsets := r.claims.document(); len(offsets["a"]) != 0 {
		t.Errorf("stored %v before the ends are known", offsets["a"])
	}
	sick.Store(false)
	r.acks.resolved(7)
	if _, offsets := r.claims.document(); len(offsets["a"]) != 2 {
		t.Errorf("stored %v, want both ends", offsets["a"])
	}
}

func TestN09_GrownTopicIsDrainedThenAdopted(t *testing.T) {
	t.Parallel()
	topic := stacktest.Topic(t, 1)
	r := open(t, setUp{})
	for i := range 20 {
		r.send(t, rec(topic, fmt.Sprint("k", i%10), fmt.Sprintf("k/%d", i/10)))
	}
	r.Flush()
	r.acks.resolved(20)
	grow(t, topic, 3)
	until(t, "the new partitions are adopted", func() bool {
		wake(r.renewWake)
		r.mu.Lock()
		defer r.mu.Unlock()
		return len(r.topics[topic].partitions) == 3 && r.topics[topic].isReady()
	})
	_, offsets := r.claims.document()
	if len(offsets[topic]) != 3 {
		t.Fatalf("saved offsets %v, want three", offsets[topic])
	}
	for i := range 20 {
		r.send(t, rec(topic, fmt.Sprint("k", i%10), fmt.Sprintf("k/%d", 2+i/10)))
	}
	r.Flush()
	r.acks.resolved(40)
	log := read(t, stacktest.Brokers(t), topic)
	inOrder(t, log, 10, 4)
	if len(log) != 3 {
		t.Errorf("%d partitions have records, want all 3", len(log))
	}
}

func TestN09_GrowthWaitsForWhatIsInFlight(t *testing.T) {
	t.Parallel()
	r := open(t, setUp{noRun: true})
	r.mu.Lock()
	top := r.findOrAddTopicLocked("t")
	top.addPartitions(1)
	r.mu.Unlock()
	r.send(t, rec("t", "k", "0")) // to the old partition
	r.applyLayout(&Layout{Topics: map[string]TopicLayout{"t": {Partitions: make([]PartitionLayout, 2)}}})
	r.send(t, rec("t", "k", "1")) // waits for the new count
	r.mu.Lock()
	if len(top.partitions[0].queue) != 1 || countRecords(top.partitions[0].queue) != 1 || countRecords(top.waiting) != 1 {
		t.Fatalf("%d queued, %d waiting", countRecords(top.partitions[0].queue), countRecords(top.waiting))
	}
	top.partitions[0].queue[0].builder.Reset(nil)
	r.mu.Unlock()
	if names := r.topicsToAdopt(); len(names) != 0 {
		t.Fatalf("%v are adopted while a record is in flight", names)
	}
	r.mu.Lock()
	top.partitions[0].queue = nil
	r.mu.Unlock()
	if names := r.topicsToAdopt(); !slices.Equal(names, []string{"t"}) {
		t.Fatalf("a drained topic is not adopted: %v", names)
	}
}

func TestMissingTopicHoldsItselfAlone(t *testing.T) {
	t.Parallel()
	there, missing := stacktest.Topic(t, 1), stacktest.Name(t)
	r := open(t, setUp{})
	for i := range 30 {
		r.send(t, rec(missing, "k", fmt.Sprintf("k/%d", i)))
		r.send(t, rec(there, "k", fmt.Sprintf("k/%d", i)))
		r.Flush()
	}
	r.acks.until(patient, "the other topic flows", func() bool { return len(r.acks.acked) == 30 })
	until(t, "the fix is told", func() bool {
		return slices.ContainsFunc(r.State(), func(b Blocked) bool {
			return b.Topic == missing && b.Partition == -1 && b.Kind == kindMissing && b.Count == 30 && strings.Contains(b.Reason, "topics.create")
		})
	})
	stacktest.CreateTopic(t, missing, 2)
	r.acks.resolved(60)
	inOrder(t, read(t, stacktest.Brokers(t), missing), 1, 30)
	if left := r.State(); len(left) != 0 {
		t.Fatalf("still blocked: %+v", left)
	}
}

func TestTopicIsCreatedOnDemand(t *testing.T) {
	t.Parallel()
	topic := stacktest.Name(t)
	r := open(t, setUp{cfg: Config{Create: &TopicCreate{Partitions: 4, Replication: 1, Configs: map[string]string{"max.message.bytes": "123456", "cleanup.policy": "compact"}}}})
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		_, _ = admin(t).DeleteTopics(ctx, &kafka.DeleteTopicsRequest{Topics: []string{topic}})
	})
	for i := range 40 {
		r.send(t, rec(topic, fmt.Sprint("k", i%8), fmt.Sprintf("k/%d", i/8)))
	}
	r.Flush()
	r.acks.resolved(40)
	inOrder(t, read(t, stacktest.Brokers(t), topic), 8, 5)
	got, err := r.client.DescribeTopics(t.Context(), []string{topic})
	if err != nil {
		t.Fatal(err)
	}
	if c := got[topic]; c.MaxMessageBytes != 123456 || c.CleanupPolicy != "compact" || c.MinISR != 1 {
		t.Fatalf("created as %+v", c)
	}
}

func TestTopicThatCannotBeCreatedSaysWhy(t *testing.T) {
	t.Parallel()
	topic := stacktest.Name(t)
	r := open(t, setUp{cfg: Config{Create: &TopicCreate{Partitions: 1, Replication: 5}}})
	r.send(t, rec(topic, "k", "1"))
	until(t, "the reason is told", func() bool {
		return slices.ContainsFunc(r.State(), func(b Blocked) bool {
			return b.Topic == topic && strings.Contains(b.Reason, "topics.create.replication")
		})
	})
	bad := topic + "/no"
	r.send(t, rec(bad, "k", "1"))
	until(t, "an impossible name is told", func() bool {
		return slices.ContainsFunc(r.State(), func(b Blocked) bool { return b.Topic == bad && strings.Contains(b.Reason, "does not allow the topic name") })
	})
}

func TestTopicDeletedMidRunIsHeldAndComesBack(t *testing.T) {
	t.Parallel()
	topic := stacktest.Name(t)
	stacktest.CreateTopic(t, topic, 1)
	r := open(t, setUp{})
	for i := range 5 {
		r.send(t, rec(topic, "k", fmt.Sprintf("k/%d", i)))
	}
	r.Flush()
	r.acks.resolved(5)
	res, err := admin(t).DeleteTopics(t.Context(), &kafka.DeleteTopicsRequest{Topics: []string{topic}})
	if err != nil || res.Errors[topic] != nil {
		t.Fatal(err, res)
	}
	until(t, "the deletion is seen", func() bool { // before that the broker may take records, and lose them
		wake(r.renewWake)
		r.mu.Lock()
		defer r.mu.Unlock()
		return r.topics[topic].obstacle.kind == kindMissing
	})
	for i := range 5 {
		r.send(t, rec(topic, "k", fmt.Sprintf("k/%d", i)))
		r.Flush()
	}
	until(t, "the deletion is told", func() bool {
		return slices.ContainsFunc(r.State(), func(b Blocked) bool { return b.Topic == topic && b.Kind == kindMissing })
	})
	stacktest.CreateTopic(t, topic, 1)
	r.acks.resolved(10)
	tp := record.TopicPartition{Topic: topic}
	if got := r.acks.restored[tp]; len(got) != 2 || got[1] != 0 {
		t.Errorf("restored %v: the stored offset has to follow the new topic's", got)
	}
	inOrder(t, read(t, stacktest.Brokers(t), topic), 1, 5)
}

func TestN08_IdlePartitionsMoveTheirStoredOffset(t *testing.T) {
	t.Parallel()
	topic := stacktest.Topic(t, 2)
	r := open(t, setUp{})
	x := rec(topic, "k", "1")
	x.Partition = 0
	r.send(t, x)
	r.Flush()
	r.acks.resolved(1)
	other := open(t, setUp{txid: "outrelay.other." + topic})
	for range 5 {
		x.Partition = 1
		other.send(t, x)
	}
	other.Flush()
	other.acks.resolved(5)

	if err := r.kill(); err != nil { // so that nobody else asks meanwhile
		t.Fatal(err)
	}
	r.refreshIdleOffsets(t.Context()) // in the replay nothing moves: hits may stand below
	if len(r.acks.idle) != 0 {
		t.Fatalf("idle offsets %v during the replay", r.acks.idle)
	}
	r.EndReplay()
	r.refreshIdleOffsets(t.Context())
	for p, want := range []int64{1, 5} {
		if got := r.acks.idle[record.TopicPartition{Topic: topic, Partition: int32(p)}]; got != want {
			t.Errorf("partition %d: idle at %d, want %d", p, got, want)
		}
	}
	clear(r.acks.idle)
	r.mu.Lock()
	r.topics[topic].partitions[1].busy = true // in flight: its offset is its own record's
	r.topics[topic].partitions[0].quarantine = true
	r.mu.Unlock()
	r.refreshIdleOffsets(t.Context())
	if len(r.acks.idle) != 0 {
		t.Fatalf("idle offsets %v of partitions that are in flight or in quarantine", r.acks.idle)
	}
	r.mu.Lock()
	r.topics[topic].partitions[1].busy = false
	r.topics[topic].partitions[0].quarantine = false
	r.mu.Unlock()
}

// takeOver opens a sink as the next owner of what the document says.
func takeOver(t *testing.T, txid string, c *claims) *rig {
	t.Helper()
	return open(t, setUp{txid: txid, claims: c})
}

func TestN07_WhatWasSentBeforeIsAckedWhereItStands(t *testing.T) {
	t.Parallel()
	topic := stacktest.Topic(t, 3)
	txid, c := "outrelay.test."+topic, &claims{}
	first := takeOver(t, txid, c)
	for i := range 60 {
		first.send(t, rec(topic, fmt.Sprint("k", i%6), fmt.Sprintf("k%d/%d", i%6, i/6)))
		if i%7 == 0 {
			first.Flush()
		}
	}
	first.Flush()
	first.acks.resolved(60)
	if err := first.kill(); err != nil {
		t.Fatal(err)
	}
	// The checkpoint knows nothing of them: the same 60 come again, and 60 more.
	second := takeOver(t, txid, c)
	for i := range 120 {
		second.send(t, rec(topic, fmt.Sprint("k", i%6), fmt.Sprintf("k%d/%d", i%6, i/6)))
	}
	second.Flush()
	second.acks.resolved(120)
	inOrder(t, read(t, stacktest.Brokers(t), topic), 6, 20)
	for k := range record.Ticket(60) {
		if first.acks.acked[k] != second.acks.acked[k] {
			t.Errorf("ticket %d: acked at %v, was sent to %v", k, second.acks.acked[k], first.acks.acked[k])
		}
	}
	x := rec(topic, "k0", "late/1")
	if err := first.Send(&x, 999); !errors.Is(err, ErrClosed) {
		t.Fatalf("a closed sink takes records: %v", err)
	}
	second.EndReplay()
	second.send(t, rec(topic, "k0", "k0/20"))
	second.Flush()
	second.acks.resolved(121)
}

func TestN07_FoundAlsoWhenTheTopicHasGrownSince(t *testing.T) {
	t.Parallel()
	topic := stacktest.Topic(t, 1)
	txid, c := "outrelay.test."+topic, &claims{}
	first := takeOver(t, txid, c)
	send := func(r *rig, n int) {
		for i := range n {
			r.send(t, rec(topic, fmt.Sprint("k", i%10), fmt.Sprintf("k%d/%d", i%10, i/10)))
		}
		r.Flush()
	}
	send(first, 30)
	first.acks.resolved(30)
	if err := first.kill(); err != nil {
		t.Fatal(err)
	}
	grow(t, topic, 4)
	second := takeOver(t, txid, c)
	send(second, 50)
	second.acks.resolved(50)
	inOrder(t, read(t, stacktest.Brokers(t), topic), 10, 5)
}

// TestN07_FoundAlsoWhenTheGrowthWasAdoptedBeforeTheCrash: the stored offsets know of the new partitions, and the position lies before
// events that were acknowledged in the old ones.
func TestN07_FoundAlsoWhenTheGrowthWasAdoptedBeforeTheCrash(t *testing.T) {
	t.Parallel()
	topic := stacktest.Topic(t, 1)
	txid, c := "outrelay.test."+topic, &claims{}
	first := takeOver(t, txid, c)
	send := func(r *rig, n int) {
		for i := range n {
			r.send(t, rec(topic, fmt.Sprint("k", i%10), fmt.Sprintf("k%d/%d", i%10, i/10)))
		}
		r.Flush()
	}
	send(first, 30)
	first.acks.resolved(30)
	grow(t, topic, 4)
	until(t, "the new partitions are adopted", func() bool {
		wake(first.renewWake)
		first.mu.Lock()
		defer first.mu.Unlock()
		return len(first.topics[topic].partitions) == 4 && first.topics[topic].isReady()
	})
	if err := first.kill(); err != nil {
		t.Fatal(err)
	}
	second := takeOver(t, txid, c)
	send(second, 50)
	second.acks.resolved(50)
	inOrder(t, read(t, stacktest.Brokers(t), topic), 10, 5)
}

// TestN07_TheOldPartitionOfAKeyIsReadBeforeItsRecordsGoElsewhere: the topic has grown since the crash, and the partition that
// the keys had before cannot be read at the take-over. What may stand there is not sent to the new partitions, and is found.
func TestN07_TheOldPartitionOfAKeyIsReadBeforeItsRecordsGoElsewhere(t *testing.T) {
	t.Parallel()
	topic := stacktest.Topic(t, 1)
	txid, c := "outrelay.test."+topic, &claims{}
	first := takeOver(t, txid, c)
	for i := range 30 {
		first.send(t, rec(topic, fmt.Sprint("k", i%10), fmt.Sprintf("k%d/%d", i%10, i/10)))
	}
	first.Flush()
	first.acks.resolved(30)
	if err := first.kill(); err != nil {
		t.Fatal(err)
	}
	grow(t, topic, 4)
	d := newDesk(t)
	d.r = open(t, setUp{txid: txid, claims: c, noRun: true, holder: d})
	p, hits := d.r.hold(topic)
	d.r.run(t)
	until(t, "the new partitions are adopted", func() bool {
		wake(d.r.renewWake)
		d.r.mu.Lock()
		defer d.r.mu.Unlock()
		return len(d.r.topics[topic].partitions) == 4 && d.r.topics[topic].isReady()
	})
	for i := range 50 {
		_, _ = d.send(rec(topic, fmt.Sprint("k", i%10), fmt.Sprintf("k%d/%d", i%10, i/10)))
	}
	d.r.Flush()
	d.r.EndReplay()
	if err := d.r.admitTails(t.Context(), map[record.TopicPartition]*fence.Tail{p.tp: {From: 0, Next: p.ackedEnd, Hits: hits}}); err != nil {
		t.Fatal(err)
	}
	d.release()
	d.answered(50)
	inOrder(t, read(t, stacktest.Brokers(t), topic), 10, 5)
}

func TestN04_DeposedOwnerWritesNothing(t *testing.T) {
	t.Parallel()
	topic := stacktest.Topic(t, 3)
	txid, c := "outrelay.test."+topic, &claims{}
	first := takeOver(t, txid, c)
	for i := range 30 {
		first.send(t, rec(topic, fmt.Sprint("k", i%6), fmt.Sprintf("k%d/%d", i%6, i/6)))
	}
	first.Flush()
	first.acks.resolved(30)
	second := takeOver(t, txid, c)
	if n := len(second.session.Quarantined()); n != 0 {
		t.Fatalf("%d partitions are in quarantine on a healthy cluster", n)
	}
	for k := range 6 { // the first one is alive and knows of nothing; each partition refuses it
		x := rec(topic, fmt.Sprint("k", k), "zombie")
		_ = first.Send(&x, record.Ticket(1000+k))
	}
	first.Flush()
	if err := first.end(t); !errors.Is(err, ErrFenced) {
		t.Fatalf("the deposed owner ended with %v, want ErrFenced", err)
	}
	for i := range 60 {
		second.send(t, rec(topic, fmt.Sprint("k", i%6), fmt.Sprintf("k%d/%d", i%6, i/6)))
	}
	second.Flush()
	second.acks.resolved(60)
	inOrder(t, read(t, stacktest.Brokers(t), topic), 6, 10)
}

func TestKeepAliveLeavesSequencesAlone(t *testing.T) {
	t.Parallel()
	topic := stacktest.Topic(t, 2)
	r := open(t, setUp{})
	for i := range 20 {
		r.send(t, rec(topic, fmt.Sprint("k", i%4), fmt.Sprintf("k/%d", i/4)))
		r.Flush()
		if i%5 != 4 {
			continue
		}
		r.mu.Lock()
		if len(r.topics[topic].partitions) == 2 {
			r.topics[topic].partitions[i/5%2].lastUsed = time.Now().Add(-r.expiry.IdleAfter() - time.Second)
		}
		r.mu.Unlock()
		if _, err := r.keepAlive(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	r.acks.resolved(20)
	inOrder(t, read(t, stacktest.Brokers(t), topic), 4, 5)
}

// TestN10_NothingOfAKeyIsSkippedAfterOneWasSent in a compacted topic. In any other nothing of a key disappears alone, and
// what stands there is not sent again.
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
			// Compaction has removed the first record of a: of what was sent, only its second and b's are left.
			first.send(t, rec(topic, "a", "a2"))
			first.send(t, rec(topic, "b", "b1"))
			first.Flush()
			first.acks.resolved(2)
			if err := first.kill(); err != nil {
				t.Fatal(err)
			}
			second := takeOver(t, txid, c)
			second.send(t, rec(topic, "a", "a1"))
			second.send(t, rec(topic, "a", "a2")) // stands in the topic, but a1 comes behind it now
			second.send(t, rec(topic, "b", "b1"))
			second.Flush()
			second.acks.resolved(3)
			if got := values(read(t, stacktest.Brokers(t), topic))[0]; !slices.Equal(got, want) {
				t.Fatalf("the log is %v, want %v", got, want)
			}
		})
	}
}

func TestQuarantinedPartitionWaitsAloneAndSkipsWhatItHas(t *testing.T) {
	t.Parallel()
	topic := stacktest.Topic(t, 2)
	txid, c := "outrelay.test."+topic, &claims{}
	first := takeOver(t, txid, c)
	send := func(r *rig, n int) {
		for i := range n {
			for p := range int32(2) {
				x := rec(topic, fmt.Sprint("k", p), fmt.Sprintf("k%d/%d", p, i))
				x.Partition = p
				r.send(t, x)
			}
		}
		r.Flush()
	}
	send(first, 5)
	first.acks.resolved(10)
	if err := first.kill(); err != nil {
		t.Fatal(err)
	}
	second := open(t, setUp{txid: txid, claims: c, noRun: true})
	tp := record.TopicPartition{Topic: topic, Partition: 1}
	second.mu.Lock() // as if partition 1 had been sick at the take-over
	p := second.topics[topic].partitions[1]
	tail := &fence.Tail{From: 0, Next: p.ackedEnd, Hits: p.hits}
	p.quarantine, p.hits = true, nil
	p.topic.hitsLeft -= tail.Hits.Len()
	p.setObstacle(obstacle{kindQuarantined, "sick"}, time.Now())
	second.mu.Unlock()
	second.run(t)
	send(second, 8)
	second.acks.until(patient, "the healthy one flows", func() bool { return len(second.acks.acked) == 8 })
	if state := second.State(); len(state) != 1 || state[0].Partition != 1 || state[0].Count != 8 || state[0].Kind != kindQuarantined {
		t.Fatalf("state %+v", state)
	}
	second.EndReplay() // the stream has passed; what waits is judged all the same
	if err := second.admitTails(t.Context(), map[record.TopicPartition]*fence.Tail{tp: tail}); err != nil {
		t.Fatal(err)
	}
	second.acks.resolved(16)
	inOrder(t, read(t, stacktest.Brokers(t), topic), 2, 8)
}
