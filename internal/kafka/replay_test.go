package kafka

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/outrelay/outrelay/internal/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/kafka/fence"
	"github.com/outrelay/outrelay/internal/record"
)

// successor sends n records of one key to a topic of one partition, crashes, and returns the next owner, which does not
// run yet and has them all to send again.
func successor(t *testing.T, n int) (r *rig, topic string) {
	t.Helper()
	topic = stacktest.Topic(t, 1)
	txid, c := "outrelay.test."+topic, &claims{}
	first := takeOver(t, txid, c)
	for i := range n {
		first.send(t, rec(topic, "k", fmt.Sprintf("k/%d", i)))
	}
	first.Flush()
	first.acks.resolved(n)
	if err := first.kill(); err != nil {
		t.Fatal(err)
	}
	return open(t, setUp{txid: txid, claims: c, noRun: true}), topic
}

// sequence sends records from to, exclusive, of the one key.
func (r *rig) sequence(t *testing.T, topic string, from, to int) {
	t.Helper()
	for i := from; i < to; i++ {
		r.send(t, rec(topic, "k", fmt.Sprintf("k/%d", i)))
	}
	r.Flush()
}

// hold puts the only partition into quarantine, as one that could not be read at the take-over, and returns what is in it.
func (r *rig) hold(topic string) (*partition, *fence.Known) {
	r.mu.Lock()
	defer r.mu.Unlock()
	p := r.topics[topic].partitions[0]
	hits := p.hits
	p.topic.hitsLeft -= hits.Len()
	p.quarantine, p.hits = true, nil
	p.setObstacle(obstacle{kindQuarantined, "sick"}, time.Now())
	return p, hits
}

// A partition that is released late and was read from the start of its log flags what is sent in the replay.
func TestN07_ALateReleaseThatWasOutOfRangeIsFlagged(t *testing.T) {
	t.Parallel()
	r, topic := successor(t, 10)
	p, hits := r.hold(topic)
	tail := &fence.Tail{From: 0, Next: p.ackedEnd, Hits: hits, OutOfRange: true}
	r.sequence(t, topic, 0, 12)
	tp := record.TopicPartition{Topic: topic}
	if err := r.admitTails(t.Context(), map[record.TopicPartition]*fence.Tail{tp: tail}); err != nil {
		t.Fatal(err)
	}
	if !p.unreadStretch {
		t.Error("what follows is not flagged")
	}
	r.run(t)
	r.acks.resolved(12)
	inOrder(t, read(t, stacktest.Brokers(t), topic), 1, 12)
}

func TestN07_TheEndOfTheReplayLeavesHitsToWhatWaits(t *testing.T) {
	t.Parallel()
	t.Run("for a growing topic", func(t *testing.T) {
		t.Parallel()
		topic := stacktest.Topic(t, 1)
		txid, c := "outrelay.test."+topic, &claims{}
		first := takeOver(t, txid, c)
		send := func(r *rig, from, to int) {
			for i := from; i < to; i++ {
				r.send(t, rec(topic, fmt.Sprint("k", i%10), fmt.Sprintf("k%d/%d", i%10, i/10)))
			}
			r.Flush()
		}
		send(first, 0, 30)
		first.acks.resolved(30)
		if err := first.kill(); err != nil {
			t.Fatal(err)
		}
		second := open(t, setUp{txid: txid, claims: c, noRun: true})
		grow(t, topic, 4)
		if err := second.loadLayout(t.Context()); err != nil {
			t.Fatal(err)
		}
		send(second, 0, 40)
		if n := countRecords(second.topics[topic].waiting); n != 40 {
			t.Fatalf("%d records wait, want all 40", n)
		}
		second.EndReplay()
		send(second, 40, 50)
		second.run(t)
		second.acks.resolved(50)
		inOrder(t, read(t, stacktest.Brokers(t), topic), 10, 5)
		second.forgotten(t, topic)
	})
	t.Run("in quarantine", func(t *testing.T) {
		t.Parallel()
		r, topic := successor(t, 10)
		r.sequence(t, topic, 0, 3)
		p, hits := r.hold(topic)
		r.sequence(t, topic, 3, 11)
		r.EndReplay()
		r.sequence(t, topic, 11, 12)
		tp := record.TopicPartition{Topic: topic}
		if err := r.admitTails(t.Context(), map[record.TopicPartition]*fence.Tail{tp: {From: 0, Next: p.ackedEnd, Hits: hits}}); err != nil {
			t.Fatal(err)
		}
		r.run(t)
		r.acks.resolved(12)
		inOrder(t, read(t, stacktest.Brokers(t), topic), 1, 12)
		r.mu.Lock()
		defer r.mu.Unlock()
		if n := p.hits.Len(); n != 0 || r.topics[topic].hitsLeft != 0 { // what is left is kept for deliveries outside of the stream's order
			t.Fatalf("%d hits are left in the partition, %d in the topic", n, r.topics[topic].hitsLeft)
		}
	})
}

// forgotten checks that nothing of the replay is left.
func (r *rig) forgotten(t *testing.T, topic string) {
	t.Helper()
	r.mu.Lock()
	defer r.mu.Unlock()
	top := r.topics[topic]
	if top.hitsLeft != 0 || top.sentKeys != nil || top.allKeysSent {
		t.Errorf("%d hits and %d keys are left of the replay", top.hitsLeft, len(top.sentKeys))
	}
	for _, p := range top.partitions {
		if p.hits != nil || p.unreadStretch {
			t.Errorf("partition %d: %d hits, flag %t", p.tp.Partition, p.hits.Len(), p.unreadStretch)
		}
	}
}

// TestN10_KeysThatWereSentAreBounded: beyond the bound nothing of any key is skipped any more, which is safe, and says so.
func TestN10_KeysThatWereSentAreBounded(t *testing.T) {
	t.Parallel()
	r, topic := successor(t, 4)
	top := r.topics[topic]
	r.sequence(t, topic, 0, 1) // found
	r.mu.Lock()
	top.compacted = true
	top.sentKeys = map[sentKey]struct{}{}
	for i := range maxSentKeys - 1 {
		top.sentKeys[sentKey{key: fmt.Sprint("other-", i)}] = struct{}{}
	}
	r.mu.Unlock()
	r.sequence(t, topic, 1, 2) // found
	r.send(t, rec(topic, "new", "new/0"))
	x := rec(topic, "keyless", "keyless")
	x.Key = nil
	r.send(t, x)
	if top.sentKeys != nil {
		t.Errorf("%d keys are kept", len(top.sentKeys))
	}
	r.sequence(t, topic, 2, 4) // stand in the topic, and nobody can tell any more that nothing of k was sent since
	r.EndReplay()
	r.sequence(t, topic, 4, 5)
	r.run(t)
	r.acks.resolved(7)
	var got []string
	for _, g := range read(t, stacktest.Brokers(t), topic)[0] {
		v := string(g.Value)
		if g.Headers[len(g.Headers)-1].Key == string(redeliveredHeader.Key) {
			v += " again"
		}
		got = append(got, v)
	}
	if want := []string{"k/0", "k/1", "k/2", "k/3", "new/0 again", "keyless again", "k/2 again", "k/3 again", "k/4"}; !slices.Equal(got, want) {
		t.Errorf("the log is %v, want %v", got, want)
	}
	r.forgotten(t, topic)
}

// A scheduled or replayed envelope that is sent during a replay has no place in the order of its key: what of the stream
// stands in the topic is found all the same.
func TestN10_IsNotAboutDeliveriesOutsideOfTheStream(t *testing.T) {
	t.Parallel()
	r, topic := successor(t, 4)
	x := rec(topic, "k", "due")
	r.acks.mu.Lock()
	r.acks.bytes += r.Size(&x)
	r.acks.mu.Unlock()
	if err := r.Send(&x, record.Side|1); err != nil {
		t.Fatal(err)
	}
	r.sequence(t, topic, 0, 4)
	r.EndReplay()
	r.run(t)
	r.acks.resolved(5)
	if got := values(read(t, stacktest.Brokers(t), topic))[0]; len(got) != 5 {
		t.Fatalf("the log is %v, want each record once", got)
	}
}

// unread makes the partition of a topic one that could not be read at the take-over, and returns what is in it.
func (r *rig) unread(topic string) map[record.TopicPartition]*fence.Tail {
	r.mu.Lock()
	defer r.mu.Unlock()
	p := r.topics[topic].partitions[0]
	tail := &fence.Tail{From: 0, Next: p.ackedEnd, Hits: p.hits}
	p.topic.hitsLeft -= p.hits.Len()
	p.quarantine, p.hits = true, nil
	return map[record.TopicPartition]*fence.Tail{{Topic: topic}: tail}
}

// besides returns the successor, which does not run yet, of an owner that has sent these outside of the stream's order.
func besides(t *testing.T, holder record.Holder, values ...string) (r *rig, topic string) {
	t.Helper()
	topic = stacktest.Topic(t, 1)
	txid, c := "outrelay.test."+topic, &claims{}
	first := takeOver(t, txid, c)
	for _, v := range values {
		first.send(t, rec(topic, v, v))
	}
	first.Flush()
	first.acks.resolved(len(values))
	if err := first.kill(); err != nil {
		t.Fatal(err)
	}
	return open(t, setUp{txid: txid, claims: c, noRun: true, holder: holder}), topic
}

// What an earlier owner has sent outside of the stream's order into a partition that could not be read at the take-over is
// found there, also when the partition is released before the replay ends and the delivery's turn comes later.
func TestN07_ALateReleaseOutlastsTheReplayForDeliveriesOutsideOfTheStream(t *testing.T) {
	t.Parallel()
	r, topic := besides(t, &openDoors{}, "due")
	if err := r.admitTails(t.Context(), r.unread(topic)); err != nil {
		t.Fatal(err)
	}
	r.EndReplay()
	x := rec(topic, "due", "due")
	r.acks.mu.Lock()
	r.acks.bytes += r.Size(&x)
	r.acks.mu.Unlock()
	if err := r.Send(&x, record.Side|1); err != nil {
		t.Fatal(err)
	}
	r.run(t)
	r.acks.resolved(1)
	if got := values(read(t, stacktest.Brokers(t), topic))[0]; len(got) != 1 {
		t.Fatalf("the log is %v, want the record once", got)
	}
}

// TestN08_ALateReleaseTellsOfWhatItHasFound, with the lowest offset of it, once; and each of it can be taken at its place, whether
// its partition takes records or not, before its turn and once only.
func TestN08_ALateReleaseTellsOfWhatItHasFound(t *testing.T) {
	t.Parallel()
	doors := &openDoors{}
	r, topic := besides(t, doors, "x", "y", "z")
	x := rec(topic, "another key", "y")
	take := func(k record.Ticket) bool {
		r.acks.mu.Lock()
		r.acks.bytes += r.Size(&x)
		r.acks.mu.Unlock()
		if r.Take(&x, record.Side|k) {
			return true
		}
		r.acks.mu.Lock()
		r.acks.bytes -= r.Size(&x)
		r.acks.mu.Unlock()
		return false
	}
	tails := r.unread(topic)
	if len(doors.found) != 0 || take(1) {
		t.Fatalf("told of %v, and something was taken, before it was read", doors.found)
	}
	if err := r.admitTails(t.Context(), tails); err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(doors.found, []int64{0}) {
		t.Fatalf("told of %v, want the lowest offset", doors.found)
	}
	r.EndReplay()
	r.mu.Lock()
	r.topics[topic].partitions[0].parked = true
	r.mu.Unlock()
	if !take(2) || take(3) {
		t.Fatal("want that it is taken once")
	}
	if at := r.acks.acked[record.Side|2]; at.off != 1 || at.tp.Topic != topic {
		t.Fatalf("acked at %+v, want offset 1", at)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if p := r.topics[topic].partitions[0]; p.topic.hitsLeft != 2 || p.hits.Len() != 2 {
		t.Errorf("%d are left of the topic, want 2", p.topic.hitsLeft)
	}
}

// TestN08_ALateReleaseOfNothingHoldsNothing.
func TestN08_ALateReleaseOfNothingHoldsNothing(t *testing.T) {
	t.Parallel()
	doors := &openDoors{}
	r, topic := besides(t, doors, "x")
	tails := r.unread(topic)
	for _, tail := range tails {
		tail.Hits = &fence.Known{}
	}
	if err := r.admitTails(t.Context(), tails); err != nil {
		t.Fatal(err)
	}
	if len(doors.found) != 0 {
		t.Errorf("told of %v", doors.found)
	}
	r.run(t)
}
