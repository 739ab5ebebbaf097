package pipeline

import (
	"context"
	"errors"
	"reflect"
	"slices"
	"testing"
	"time"

	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/relay/internal/ledger"
	"github.com/outrelay/outrelay/internal/relay/stored/waiting"
)

func itemWithKey(key string, topics ...string) *Item {
	it := &Item{CommitMS: 1, Raw: []byte(key), DB: []byte("x"), Coll: []byte("outbox"), Pos: []byte("82")}
	for _, topic := range topics {
		it.Records = append(it.Records, record.Record{Topic: topic, Key: []byte(key), Value: make([]byte, 10)})
	}
	return it
}

func TestN11_OnlyTheParkedTargetIsPending(t *testing.T) {
	t.Parallel()
	d, s, m := newTestDispatcher(t, Config{})
	s.holder, s.hold = d, map[string]error{"away": record.ErrParked}
	if err := d.Deliver(t.Context(), itemWithKey("k", "well", "away")); err != nil {
		t.Fatal(err)
	}

	<-s.got
	m.storeQueued()
	if e := m.got[0]; e.End != ledger.Waiting || e.Reason != waiting.Parked || !slices.Equal(e.Topics, []string{"away"}) || e.Key != "k" || e.Pos != "82" {
		t.Fatalf("recorded %+v, want parked for topic away", e)
	}
	if n, _ := d.Unresolved(); n != 1 {
		t.Fatal("the ticket is resolved before the other target was acked")
	}

	d.Acked(record.TopicPartition{Topic: "well"}, 0, []record.Ticket{0}, 10)
	if n, bytes := d.Unresolved(); n != 0 || bytes != 0 {
		t.Fatalf("%d events with %d bytes are left, want none", n, bytes)
	}
}

func TestN15_AGateOpensAtZeroAndConcernsItsKeyAlone(t *testing.T) {
	t.Parallel()
	d, s, m := newTestDispatcher(t, Config{})
	s.holder = d
	if err := d.Deliver(t.Context(), itemWithKey("k", "a")); err != nil {
		t.Fatal(err)
	}

	d.Withdrawn([]record.Withdrawn{{Ticket: 0, Topic: "a", Key: []byte("k"), Rejection: &record.Rejection{Class: record.RecordRejected}, Bytes: 10}})
	for _, key := range []string{"k", "other", "k"} {
		if err := d.Deliver(t.Context(), itemWithKey(key, "a")); err != nil {
			t.Fatal(err)
		}
	}
	if !slices.Equal(s.sent, []record.Ticket{0, 2}) {
		t.Fatalf("sent tickets %v, want the first and that of the other key", s.sent)
	}

	d.Acked(record.TopicPartition{Topic: "a"}, 0, []record.Ticket{2}, 10)
	m.storeQueued()
	var reasons []waiting.Reason
	for _, e := range m.got {
		reasons = append(reasons, e.Reason)
	}
	if !slices.Equal(reasons, []waiting.Reason{waiting.Retry, waiting.Blocked, waiting.Blocked}) {
		t.Fatalf("recorded %v, want one retry and two after it", reasons)
	}

	for left := 3; left > 0; left-- {
		if d.CheckGate(&itemWithKey("k", "a").Records[0], false) == nil {
			t.Fatalf("the gate is open while %d wait", left)
		}
		d.OpenGate("", "a", "k")
	}
	if err := d.CheckGate(&itemWithKey("k", "a").Records[0], false); err != nil {
		t.Fatalf("the gate is closed although nothing waits: %v", err)
	}
}

func TestPublishReportsOnceAllTargetsHaveResults(t *testing.T) {
	t.Parallel()
	d, s, _ := newTestDispatcher(t, Config{Pool: NewPool(400, 1000)})
	s.holder, s.hold = d, map[string]error{"away": record.ErrParked}
	published := make(chan record.Published, 2)
	it := itemWithKey("k", "a", "away", "b")
	if err := d.Publish(t.Context(), it.Records, func(p record.Published) { published <- p }); err != nil {
		t.Fatal(err)
	}

	k := s.sent[0]
	if !k.IsSide() || len(published) > 0 {
		t.Fatalf("ticket %x, reported %d times; want a side ticket and no report", k, len(published))
	}

	d.Acked(record.TopicPartition{Topic: "a", Partition: 2}, 7, []record.Ticket{k}, 10)
	d.Withdrawn([]record.Withdrawn{{Ticket: k, Topic: "b", Key: []byte("k"), Rejection: &record.Rejection{Class: record.RecordRejected}}})
	p := <-published
	if len(p.Results) != 3 || !errors.Is(p.Results[0].Held, record.ErrParked) || p.Results[1].Offset != 7 || p.Results[1].Partition != 2 || p.Results[2].Rejection == nil {
		t.Fatalf("results %+v, want parked, acked at 7 of partition 2, rejected", p.Results)
	}
	if !errors.Is(d.Publish(t.Context(), itemWithKey("k", "b").Records, func(p record.Published) { published <- p }), nil) {
		t.Fatal("publishing after a rejection fails")
	}
	if p := <-published; !errors.Is(p.Results[0].Held, record.ErrBlocked) {
		t.Fatalf("after a rejection that is not written down: %+v, want blocked", p.Results)
	}

	d.ResumeKey("", "b", "k")
	if d.CheckGate(&it.Records[2], true) != nil {
		t.Fatal("the key stays stopped")
	}
}

// N15: an envelope is in flight to one topic, and another topic has given it back. That is reported with the last result only. If the other topic can
// be written in the meantime, no later envelope of the key may overtake it there.
func TestN15_NothingOvertakesAnEnvelopeThatOneOfItsTopicsHasGivenBack(t *testing.T) {
	t.Parallel()
	d, s, _ := newTestDispatcher(t, Config{Pool: NewPool(4000, 1000)})
	s.holder, s.hold = d, map[string]error{"away": record.ErrPartitionParked}
	published := make(chan record.Published, 3)
	publish := func(key string, topics ...string) {
		t.Helper()
		if err := d.Publish(t.Context(), itemWithKey(key, topics...).Records, func(p record.Published) { published <- p }); err != nil {
			t.Fatal(err)
		}
	}
	publish("k", "a", "away")
	s.hold = nil
	publish("k", "away")
	// Publish reports a blocked record before it returns.
	if len(published) != 1 {
		t.Fatal("the later envelope of the key was sent")
	}
	if p := <-published; !errors.Is(p.Results[0].Held, record.ErrBlocked) {
		t.Fatalf("the later envelope of the key: %+v, want blocked", p.Results)
	}
	publish("other", "away")
	if len(published) > 0 {
		t.Fatalf("an envelope of another key: %+v, want in flight", (<-published).Results)
	}

	d.Acked(record.TopicPartition{Topic: "a"}, 0, []record.Ticket{s.sent[0]}, 10)
	<-published
	d.ResumeKey("", "away", "k")
	publish("k", "away")
	if len(published) > 0 {
		t.Fatalf("after the key was resumed: %+v, want in flight", (<-published).Results)
	}
}

func TestN08_ADeliveryOutsideTheOrderHoldsItsOffset(t *testing.T) {
	t.Parallel()
	d, s, _ := newTestDispatcher(t, Config{})
	tp := record.TopicPartition{Topic: "a"}
	d.Restore(tp, 5)
	published := make(chan record.Published, 1)
	if err := d.Publish(t.Context(), itemWithKey("k", "a").Records, func(p record.Published) { published <- p }); err != nil {
		t.Fatal(err)
	}
	if err := d.Deliver(t.Context(), itemWithKey("k", "a")); err != nil {
		t.Fatal(err)
	}

	d.Position(positionAt(2))
	d.Acked(tp, 5, slices.Clone(s.sent), 20)
	p := <-published
	if _, _, offs := d.Snapshot(); offs["a"][0] != 5 {
		t.Fatalf("the stored offset is %d while the delivery at 5 is not settled", offs["a"][0])
	}

	d.Settle([]record.Ticket{p.Ticket})
	if at, _, offs := d.Snapshot(); offs["a"][0] != 7 || at.ClusterTime.T != 2 {
		t.Fatalf("the stored offset is %d at %v, want 7 after the resolved position", offs["a"][0], at)
	}
	if _, bytes := d.Unresolved(); bytes != 0 {
		t.Fatalf("%d bytes stay reserved", bytes)
	}
}

func TestN13_TheReconcilersQuarterIsItsOwn(t *testing.T) {
	t.Parallel()
	d, _, _ := newTestDispatcher(t, Config{Pool: NewPool(400, 1000)})
	recs := func(n int) []record.Record { return []record.Record{{Topic: "a", Value: make([]byte, n)}} }
	if err := d.Deliver(t.Context(), itemOfSize("a", 300)); err != nil {
		t.Fatal(err)
	}
	if err := d.Publish(t.Context(), recs(100), func(record.Published) {}); err != nil {
		t.Fatal(err)
	}

	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if err := d.Publish(ctx, recs(1), func(record.Published) {}); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("past the reconciler's quarter: %v, want the deadline", err)
	}
}

func TestThePositionWaitsForTheRecordOfADelivery(t *testing.T) {
	t.Parallel()
	d, s, m := newTestDispatcher(t, Config{})
	s.holder, s.hold = d, map[string]error{"away": record.ErrParked}
	whole, part := itemWithKey("k", "a", "b"), itemWithKey("l", "a", "away")
	whole.Sent, part.Sent = &Delivery{Outcome: ledger.Outcome{NS: "x.outbox"}}, &Delivery{Outcome: ledger.Outcome{NS: "x.outbox"}}
	for _, it := range []*Item{whole, part} {
		if err := d.Deliver(t.Context(), it); err != nil {
			t.Fatal(err)
		}
	}

	d.Position(positionAt(2))
	d.Acked(record.TopicPartition{Topic: "a"}, 3, []record.Ticket{0, 1}, 20)
	d.Acked(record.TopicPartition{Topic: "b", Partition: 1}, 9, []record.Ticket{0}, 10)
	if n, _ := d.Unresolved(); n != 2 {
		t.Fatalf("%d events are unresolved before anything was recorded, want 2", n)
	}

	// The envelope that waits for a topic is stored as waiting, and not recorded as sent.
	m.storeQueued()
	if len(m.got) != 3 || m.got[0].End != ledger.Waiting || m.got[0].Recorded || m.got[1] != &part.Sent.Outcome || m.got[2] != &whole.Sent.Outcome {
		t.Fatalf("stored %+v, want an envelope that waits, the place of its other topic, and the one whose targets were both acked", m.got)
	}
	if o := m.got[1]; !o.Partial || len(o.Sent) != 1 || o.Sent[0].Topic != "a" || m.got[2].Partial {
		t.Fatalf("recorded %+v, want the place in a", o)
	}
	if o := m.got[2]; o.End != ledger.Sent || !o.Recorded || len(o.Sent) != 2 || o.Sent[1].Topic != "b" || o.Sent[1].Offset != 9 {
		t.Fatalf("recorded %+v, want both places", o)
	}
	if p, _ := d.Reached(); p.ClusterTime.T != 2 {
		t.Fatal("the resolved position does not follow the records")
	}
}

// TestN15_AGateOpensOnceTheLetterIsStored: an envelope that has to wait, and that MongoDB cannot store, becomes a dead letter. Its
// key is free from then on, but not earlier.
func TestN15_AGateOpensOnceTheLetterIsStored(t *testing.T) {
	t.Parallel()
	d, s, m := newTestDispatcher(t, Config{})
	s.holder, s.hold = d, map[string]error{"a": record.ErrParked}
	if err := d.Deliver(t.Context(), itemWithKey("k", "a")); err != nil {
		t.Fatal(err)
	}
	if err := d.CheckGate(&itemWithKey("k", "a").Records[0], false); !errors.Is(err, record.ErrBlocked) {
		t.Fatalf("a later event of the key: %v, want blocked", err)
	}

	m.storeQueued(func(o *ledger.Outcome) { o.End = ledger.Dead })
	if err := d.CheckGate(&itemWithKey("k", "a").Records[0], false); err != nil {
		t.Fatalf("the key waits for a dead letter: %v", err)
	}
	if n, bytes := d.Unresolved(); n != 0 || bytes != 0 {
		t.Fatalf("%d events with %d bytes are left, want none", n, bytes)
	}
}

// TestN08_ADeliveryDuringARereadMovesNoOffset: the next events of the stream may already be in the topic, below the
// side delivery.
func TestN08_ADeliveryDuringARereadMovesNoOffset(t *testing.T) {
	t.Parallel()
	d, s, _ := newTestDispatcher(t, Config{})
	tp := record.TopicPartition{Topic: "a"}
	d.Restore(tp, 5)
	d.Start(positionAt(1))
	d.BeginReread(false)
	published := make(chan record.Published, 1)
	if err := d.Publish(t.Context(), itemWithKey("k", "a").Records, func(p record.Published) { published <- p }); err != nil {
		t.Fatal(err)
	}

	d.Acked(tp, 9, slices.Clone(s.sent), 10)
	d.Settle([]record.Ticket{(<-published).Ticket})
	if _, _, offs := d.Snapshot(); offs["a"][0] != 5 {
		t.Fatalf("the stored offset is %d, above records of events that the stream may repeat; want 5", offs["a"][0])
	}

	d.EndReread()
	if _, _, offs := d.Snapshot(); offs["a"][0] != 10 {
		t.Fatalf("the stored offset is %d after the reread, want 10", offs["a"][0])
	}
	if err := d.Publish(t.Context(), itemWithKey("k", "a").Records, func(p record.Published) { published <- p }); err != nil {
		t.Fatal(err)
	}

	d.Acked(tp, 10, slices.Clone(s.sent[1:]), 10)
	d.Settle([]record.Ticket{(<-published).Ticket})
	if _, _, offs := d.Snapshot(); offs["a"][0] != 11 {
		t.Fatalf("the stored offset is %d, want 11: the reread is over", offs["a"][0])
	}
}

// TestN17_ARecordThatIsDeadAtOnceHoldsNothingBack: its letter is written with the id from the record's headers, and
// later records of its key are sent.
func TestN17_ARecordThatIsDeadAtOnceHoldsNothingBack(t *testing.T) {
	t.Parallel()
	d, s, m := newTestDispatcher(t, Config{})
	s.holder = d
	if err := d.Deliver(t.Context(), itemWithKey("k", "a")); err != nil {
		t.Fatal(err)
	}
	why := &record.Rejection{Class: record.MessageTooLarge, Reason: "3 MB, limit 1 MB"}
	d.Withdrawn([]record.Withdrawn{{Ticket: 0, Topic: "a", Key: []byte("k"), ID: []byte("42"), StringID: true, NS: []byte("n"), Rejection: why, Bytes: 10}})
	if err := d.CheckGate(&itemWithKey("k", "a").Records[0], false); err != nil {
		t.Errorf("the key waits for a dead letter: %v", err)
	}

	published := make(chan record.Published, 1)
	if err := d.Publish(t.Context(), itemWithKey("k", "a").Records, func(p record.Published) { published <- p }); err != nil {
		t.Fatal(err)
	}
	d.Withdrawn([]record.Withdrawn{{Ticket: s.sent[1], Topic: "a", Key: []byte("k"), Rejection: why, Bytes: 10}})
	if p := <-published; p.Results[0].Rejection != why {
		t.Errorf("reported %+v, want the rejection", p.Results)
	}
	if err := d.CheckGate(&itemWithKey("k", "a").Records[0], true); err != nil {
		t.Errorf("deliveries outside of the stream's order wait for a dead letter: %v", err)
	}

	m.storeQueued()
	if e := m.got[0]; e.End != ledger.Dead || e.Topics != nil || e.Topic != "a" || string(e.ID) != "42" || !e.StringID || string(e.NSHash) != "n" || !reflect.DeepEqual(e.Rejection, *why) {
		t.Errorf("recorded %+v, want a dead letter of the string id 42", e)
	}
	if n, bytes := d.Unresolved(); n != 0 || bytes != 0 {
		t.Errorf("%d events with %d bytes are left", n, bytes)
	}
}

// TestDrainSidesWaitsForTheResults: DrainSides returns when each delivery has its results, or when its
// context ends.
func TestDrainSidesWaitsForTheResults(t *testing.T) {
	t.Parallel()
	d, s, _ := newTestDispatcher(t, Config{})
	if err := d.Publish(t.Context(), itemWithKey("k", "a").Records, func(record.Published) {}); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if err := d.DrainSides(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("DrainSides with a delivery in flight returned %v, want DeadlineExceeded", err)
	}

	drained := make(chan error, 1)
	go func() { drained <- d.DrainSides(t.Context()) }()
	d.Acked(record.TopicPartition{Topic: "a"}, 0, slices.Clone(s.sent), 10)
	if err := <-drained; err != nil {
		t.Fatal(err)
	}
}
