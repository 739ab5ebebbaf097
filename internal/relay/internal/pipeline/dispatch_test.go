package pipeline

import (
	"context"
	"errors"
	"sync"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.uber.org/goleak"

	"github.com/outrelay/outrelay/internal/base/mailbox"
	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/relay/internal/ledger"
	"github.com/outrelay/outrelay/internal/relay/stored/waiting"
	"github.com/outrelay/outrelay/resume"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// fakeSink keeps the records until the test results. Its faults are results that a broker gives rarely.
type fakeSink struct {
	mu     sync.Mutex
	sent   []record.Ticket
	topics []string
	reject map[string]*record.Rejection
	hold   map[string]error
	unread map[string]bool // topics that the read-back has not read
	holder record.Holder
	acks   record.Acks
	flushs int
	got    chan struct{}
}

func (f *fakeSink) Size(rec *record.Record) int { return len(rec.Value) }

func (f *fakeSink) Send(rec *record.Record, t record.Ticket) error {
	if r := f.reject[rec.Topic]; r != nil {
		return r
	}
	if err := f.hold[rec.Topic]; err != nil {
		return err
	}
	if f.holder != nil {
		if err := f.holder.CheckGate(rec, t.IsSide()); err != nil {
			return err
		}
	}

	f.mu.Lock()
	f.sent, f.topics = append(f.sent, t), append(f.topics, rec.Topic)
	f.mu.Unlock()
	f.got <- struct{}{}
	return nil
}

func (f *fakeSink) Flush()                   { f.mu.Lock(); f.flushs++; f.mu.Unlock() }
func (f *fakeSink) EndReread()               {}
func (f *fakeSink) TopicsWithHits() []string { return nil }

func (f *fakeSink) MayHold(rec *record.Record) bool { return f.unread[rec.Topic] }

func (f *fakeSink) FindHit(*record.Record) (record.TopicPartition, int64, bool) {
	return record.TopicPartition{}, 0, false
}

// fakeLedger keeps the outcomes until the test stores them.
type fakeLedger struct {
	mu    sync.Mutex
	queue []*ledger.Outcome
	got   []*ledger.Outcome // stored, in their order
}

func (l *fakeLedger) Add(list ...*ledger.Outcome) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.queue = append(l.queue, list...)
}

// storeQueued stores what was added so far. Each of change sees an outcome before its sender does.
func (l *fakeLedger) storeQueued(change ...func(*ledger.Outcome)) {
	l.mu.Lock()
	list := l.queue
	l.queue = nil
	l.got = append(l.got, list...)
	l.mu.Unlock()

	for _, o := range list {
		for _, c := range change {
			c(o)
		}
		o.Stored(o)
	}
}

func newTestDispatcher(t *testing.T, cfg Config) (*Dispatcher, *fakeSink, *fakeLedger) {
	t.Helper()
	s := &fakeSink{reject: map[string]*record.Rejection{}, got: make(chan struct{}, 1000)}
	m := &fakeLedger{}
	cfg.Ledger = m
	if cfg.Ready == nil {
		cfg.Ready = mailbox.New[string]()
	}

	cfg.Metrics = Metrics{
		Acked: func(*record.AckedBatch) {}, Dead: func(string, record.Class) {}, Held: func(string, int) {},
	}

	if cfg.Pool == nil {
		cfg.Pool = NewPool(1<<20, 1000)
	}

	r := NewResolver(cfg)
	s.acks = r
	return NewDispatcher(r, s), s, m
}

func positionAt(n uint32) resume.Position {
	return resume.Position{ClusterTime: bson.Timestamp{T: n}}
}

func itemOfSize(topic string, size int) *Item {
	return &Item{CommitMS: 1, Records: []record.Record{{Topic: topic, Value: make([]byte, size)}}}
}

func TestN13_BudgetBlocksUntilAcked(t *testing.T) {
	t.Parallel()
	// The share of the stream is 300.
	d, s, _ := newTestDispatcher(t, Config{Pool: NewPool(400, 1000)})
	for range 3 {
		if err := d.Deliver(t.Context(), itemOfSize("a", 100)); err != nil {
			t.Fatal(err)
		}
		<-s.got
	}

	delivered := make(chan error, 1)
	go func() { delivered <- d.Deliver(t.Context(), itemOfSize("a", 100)) }()
	select {
	case <-delivered:
		t.Fatal("a fourth envelope of 100 bytes fits into a share of 300")
	case <-s.got:
		t.Fatal("a fourth envelope was sent past the budget")
	case <-time.After(20 * time.Millisecond):
	}

	d.Acked(record.TopicPartition{Topic: "a"}, 0, []record.Ticket{0}, 100)
	if err := <-delivered; err != nil {
		t.Fatal(err)
	}
	if _, b := d.Unresolved(); b != 300 {
		t.Fatalf("%d bytes in use, want 300", b)
	}
}

func TestN13_AnOversizedEnvelopeGoesAlone(t *testing.T) {
	t.Parallel()
	d, s, _ := newTestDispatcher(t, Config{Pool: NewPool(400, 1000)})
	if err := d.Deliver(t.Context(), itemOfSize("a", 5000)); err != nil {
		t.Fatal(err)
	}

	<-s.got
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if err := d.Deliver(ctx, itemOfSize("a", 1)); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("next to an oversized envelope: %v, want the deadline", err)
	}

	d.Acked(record.TopicPartition{Topic: "a"}, 0, []record.Ticket{0}, 5000)
	if err := d.Deliver(t.Context(), itemOfSize("a", 1)); err != nil {
		t.Fatal(err)
	}
}

// TestN13_ADeadLetterReservesItsCopies: its envelope is in memory three times until it is stored.
func TestN13_ADeadLetterReservesItsCopies(t *testing.T) {
	t.Parallel()
	d, _, _ := newTestDispatcher(t, Config{Pool: NewPool(400, 1000)})
	dead := func() *Item {
		return &Item{CommitMS: 1, Raw: make([]byte, 60), Dead: &record.Rejection{Class: record.MessageTooLarge}}
	}
	if err := d.Deliver(t.Context(), dead()); err != nil {
		t.Fatal(err)
	}
	if _, used := d.Unresolved(); used != 180 {
		t.Errorf("%d bytes in use, want 180", used)
	}

	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if err := d.Deliver(ctx, dead()); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a second one of 180 bytes in a share of 300: %v, want the deadline", err)
	}
}

func TestN13_FanOutReleasesItsReservation(t *testing.T) {
	t.Parallel()
	// The share of the stream is 300.
	d, s, _ := newTestDispatcher(t, Config{Pool: NewPool(400, 1000)})
	it := &Item{CommitMS: 1}
	for _, topic := range []string{"a", "b", "c", "d"} {
		it.Records = append(it.Records, record.Record{Topic: topic, Value: make([]byte, 125)})
	}
	if err := d.Deliver(t.Context(), it); err != nil { // 500 bytes, alone
		t.Fatal(err)
	}

	for range it.Records {
		<-s.got
	}

	d.Acked(record.TopicPartition{Topic: "a"}, 0, []record.Ticket{0}, 125)
	if _, b := d.Unresolved(); b != 375 {
		t.Fatalf("%d bytes in use after one of four targets, want 375: more than was reserved was given back", b)
	}
}

func TestN13_WindowOfTickets(t *testing.T) {
	t.Parallel()
	d, s, _ := newTestDispatcher(t, Config{Pool: NewPool(1<<20, 2)})
	for range 2 {
		if err := d.Deliver(t.Context(), itemOfSize("a", 1)); err != nil {
			t.Fatal(err)
		}
		<-s.got
	}

	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if err := d.Deliver(ctx, itemOfSize("a", 1)); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("a third ticket in a window of two: %v", err)
	}
	if s.flushs == 0 {
		t.Fatal("queued records were not flushed before blocking, so no ack would make room")
	}
}

func TestFanOutResolvesWhenAllTargetsAreAcked(t *testing.T) {
	t.Parallel()
	d, s, _ := newTestDispatcher(t, Config{})
	d.Start(positionAt(1))
	it := &Item{CommitMS: 1, Records: []record.Record{{Topic: "a"}, {Topic: "b"}}}
	if err := d.Deliver(t.Context(), it); err != nil {
		t.Fatal(err)
	}

	d.Position(positionAt(2))
	<-s.got
	<-s.got
	d.Acked(record.TopicPartition{Topic: "a"}, 7, []record.Ticket{0}, 0)
	if p, _ := d.Reached(); p.ClusterTime.T != 1 {
		t.Fatal("the resolved position passed an event with a target that is not acked")
	}

	d.Acked(record.TopicPartition{Topic: "b"}, 9, []record.Ticket{0}, 0)
	if p, _ := d.Reached(); p.ClusterTime.T != 2 {
		t.Fatal("the resolved position stays although all targets are acked")
	}
	if err := d.Drain(t.Context()); err != nil {
		t.Fatal(err)
	}
}

func TestN17_DeadAtOnceIsRecordedBeforeThePositionPasses(t *testing.T) {
	t.Parallel()
	d, s, m := newTestDispatcher(t, Config{})
	s.reject["b"] = &record.Rejection{Class: record.MessageTooLarge, Reason: "too large"}
	d.Start(positionAt(1))
	raw := []byte("envelope")
	for _, it := range []*Item{
		{Dead: &record.Rejection{Class: record.Malformed, Reason: "no type"}, Raw: raw, DB: []byte("x"), Coll: []byte("outbox")},
		{Records: []record.Record{{Topic: "b"}}, Raw: raw, DB: []byte("x"), Coll: []byte("outbox")},
	} {
		if err := d.Deliver(t.Context(), it); err != nil {
			t.Fatal(err)
		}
	}

	d.Position(positionAt(2))
	copy(raw, "overwrit")
	if p, _ := d.Reached(); p.ClusterTime.T != 1 {
		t.Fatal("the resolved position passed a waiting envelope that is not recorded yet")
	}

	if _, unrecorded := d.Oldest(); unrecorded != 2 {
		t.Fatalf("%d envelopes are reported as not recorded, want 2", unrecorded)
	}
	drained := make(chan error, 1)
	go func() { drained <- d.Drain(t.Context()) }()
	m.storeQueued()
	if err := <-drained; err != nil {
		t.Fatal(err)
	}
	if p, _ := d.Reached(); p.ClusterTime.T != 2 {
		t.Fatal("the resolved position stays although the waiting envelopes are recorded")
	}
	if len(m.got) != 2 || string(m.got[0].Raw) != "envelope" || m.got[1].Topic != "b" {
		t.Fatalf("recorded %+v, want both envelopes as they were", m.got)
	}
}

func TestN17_ARejectionThatWantsARetryHoldsThePositionUntilItIsRecorded(t *testing.T) {
	t.Parallel()
	d, s, m := newTestDispatcher(t, Config{})
	d.Start(positionAt(1))
	if err := d.Deliver(t.Context(), itemOfSize("a", 1)); err != nil {
		t.Fatal(err)
	}

	<-s.got
	d.Withdrawn([]record.Withdrawn{{Ticket: 0, Topic: "a", Rejection: &record.Rejection{Class: record.RecordRejected, Reason: "null key"}, Bytes: 1}})
	d.Position(positionAt(2))
	if p, _ := d.Reached(); p.ClusterTime.T != 1 {
		t.Fatal("the resolved position passed a record that Kafka rejected")
	}

	m.storeQueued()
	if p, _ := d.Reached(); p.ClusterTime.T != 2 {
		t.Fatal("the resolved position stays although the retry is recorded")
	}
	if e := m.got[0]; e.End != ledger.Retrying || e.Reason != waiting.Retry || e.Topics[0] != "a" {
		t.Fatalf("recorded %+v, want a retry for topic a", e)
	}
}

func TestLagIsTheAgeOfTheOldestUnresolved(t *testing.T) {
	t.Parallel()
	d, s, _ := newTestDispatcher(t, Config{})
	now := time.UnixMilli(5000)
	if d.Lag(now) != 0 {
		t.Fatal("lag without an event")
	}

	it := itemOfSize("a", 1)
	it.CommitMS = 2000
	if err := d.Deliver(t.Context(), it); err != nil {
		t.Fatal(err)
	}

	<-s.got
	if d.Lag(now) != 3*time.Second {
		t.Fatalf("lag %v, want 3 s", d.Lag(now))
	}
}
