package activity

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/contract/envelope"
	"github.com/outrelay/outrelay/internal/contract/record"
)

// clock is a clock that the test sets. It begins at the start of ten seconds.
type clock struct{ at time.Time }

func newClock() *clock { return &clock{time.Unix(1_800_000_000, 0)} }

func (c *clock) now() time.Time { return c.at }

// newBatch returns a batch that is acked now. The records were committed these times before.
func (c *clock) newBatch(topic string, base int64, took ...time.Duration) *record.AckedBatch {
	b := &record.AckedBatch{TP: record.TopicPartition{Topic: topic, Partition: 2}, Base: base, Records: len(took), Bytes: 100 * len(took), At: c.at}
	for _, d := range took {
		b.CommitMS = append(b.CommitMS, c.at.Add(-d).UnixMilli())
	}
	return b
}

// mustReport returns the report of l, which must have one.
func mustReport(t *testing.T, l *Log) Report {
	t.Helper()
	r, ok := l.Report()
	if !ok {
		t.Fatal("there is no report")
	}
	return r
}

func TestRatesAndLatenciesAreThoseOfTheLastMinute(t *testing.T) {
	t.Parallel()
	c := newClock()
	l := New(c.now)
	if r, ok := l.Report(); ok {
		t.Errorf("before the first record: %+v", r)
	}

	took := make([]time.Duration, 60)
	for i := range took {
		took[i] = 4 * time.Millisecond
	}
	took[59] = 900 * time.Millisecond
	for range 10 {
		l.Observe(c.newBatch("orders", 40, took...))
		c.at = c.at.Add(6 * time.Second)
	}

	got := mustReport(t, l).Topics
	if len(got) != 1 {
		t.Fatalf("%+v", got)
	}
	// The oldest six seconds of the minute have left the window.
	o := got[0]
	if o.Topic != "orders" || o.Rate < 9.5 || o.Rate > 10.5 || o.Bytes != 100*o.Rate || o.P50MS < 4 || o.P50MS > 5 || o.P99MS < 900 || o.P99MS > 1125 {
		t.Errorf("%+v", o)
	}
	if o.Partition != 2 || o.Offset != 99 || !o.LastAt.Equal(c.at.Add(-6*time.Second)) {
		t.Errorf("the last record: %+v", o)
	}

	c.at = c.at.Add(time.Minute)
	if o = mustReport(t, l).Topics[0]; o.Rate != 0 || o.P99MS != 0 || o.Records != 0 || o.Offset != 99 {
		t.Errorf("a minute later: %+v", o)
	}
	c.at = c.at.Add(time.Minute)
	if r, ok := l.Report(); ok {
		t.Errorf("nothing has changed since, and there is a report: %+v", r)
	}
}

func TestTheFirstSecondsHaveTheirRate(t *testing.T) {
	t.Parallel()
	c := newClock()
	l := New(c.now)
	c.at = c.at.Add(4 * time.Second)
	l.Observe(c.newBatch("orders", 0, make([]time.Duration, 40)...))
	if got := mustReport(t, l).Topics[0].Rate; got != 10 {
		t.Errorf("40 records in 4 s: %v per second", got)
	}
}

// A record outside of the stream's order has no commit time. It counts, and has no latency.
func TestARetriedRecordHasNoLatency(t *testing.T) {
	t.Parallel()
	c := newClock()
	l := New(c.now)
	b := c.newBatch("orders", 7, time.Second)
	b.CommitMS = nil
	l.Observe(b)
	if got := mustReport(t, l).Topics[0]; got.Records != 1 || got.P50MS != 0 || got.Offset != 7 {
		t.Errorf("%+v", got)
	}
}

func TestBusiestTopicsAreListed(t *testing.T) {
	t.Parallel()
	c := newClock()
	l := New(c.now)
	c.at = c.at.Add(10 * time.Second)
	for i := range maxTopics + 5 {
		l.Observe(c.newBatch(fmt.Sprint("t", i), 0, make([]time.Duration, 1+i%200)...))
	}

	r := mustReport(t, l)
	if len(l.topics) != maxTopics || len(r.Topics) != listedTopics || r.Topics[0].Rate != 20 || r.Others.Topics != maxTopics-listedTopics+1 || r.Others.Rate == 0 {
		t.Errorf("%d topics in memory, %d listed, the first %+v, others %+v", len(l.topics), len(r.Topics), r.Topics[0], r.Others)
	}
}

func TestFirstEventsOfASecondAreSampled(t *testing.T) {
	t.Parallel()
	c := newClock()
	l := New(c.now)
	var none *Log
	recs := []record.Record{{Topic: "orders", Key: []byte("customer-7"), Headers: []record.Header{{Key: []byte("id"), Value: []byte("e-1")}}}}
	if none.Sample(c.at, recs, &envelope.View{}, nil, nil, 1) != nil || l.Sample(c.at, nil, &envelope.View{}, nil, nil, 1) != nil {
		t.Error("nothing is sampled")
	}

	raw, err := bson.Marshal(bson.D{
		{Key: "_id", Value: "e-1"},
		{Key: "aggregatetype", Value: "order"},
		{Key: "aggregateid", Value: "o-1"},
		{Key: "type", Value: "OrderPlaced"},
		{Key: "headers", Value: bson.D{{Key: "correlation-id", Value: "req-1"}, {Key: "causation-id", Value: "cart-1"}}},
		{Key: "payload", Value: "x"},
	})
	if err != nil {
		t.Fatal(err)
	}
	view := &envelope.View{}
	if err := envelope.Parse(raw, view); err != nil {
		t.Fatal(err)
	}
	sampled := 0
	for second := range 10 {
		for i := range 3 * sampledPerSecond {
			s := l.Sample(c.at, recs, view, []byte("shop"), []byte("outbox"), c.at.Add(-5*time.Millisecond).UnixMilli())
			if s == nil {
				continue
			}
			sampled++
			s.NotSent("audit", "parked")
			s.Acked(record.TopicPartition{Topic: "orders", Partition: 1}, int64(100*second+i))
		}
		c.at = c.at.Add(time.Second)
	}
	l.Observe(c.newBatch("orders", 0, 0))

	r := mustReport(t, l)
	if sampled != 10*sampledPerSecond || len(r.Events) != keptEvents {
		t.Fatalf("%d sampled, %d kept", sampled, len(r.Events))
	}
	at := c.at.Add(-time.Second)
	want := Event{
		ID: "e-1", Type: "OrderPlaced", Key: "customer-7", Collection: "shop.outbox", Topic: "orders", Partition: 1, Offset: 900 + sampledPerSecond - 1,
		AggregateType: "order", AggregateID: "o-1", CorrelationID: "req-1", CausationID: "cart-1", CommittedAt: at.Add(-5 * time.Millisecond), AckedAt: at,
	}
	if r.Events[0] != want {
		t.Errorf("the newest is %+v, want %+v", r.Events[0], want)
	}
}

// The next owner takes over the topics and events of its predecessor's report, except the ones that it
// has replaced.
func TestTheNextOwnerAdoptsTheReport(t *testing.T) {
	t.Parallel()
	c := newClock()
	old := Report{
		Topics: []Topic{{Topic: "rare", Rate: 9, Partition: 1, Offset: 5, LastAt: c.at.Add(-time.Hour)}, {Topic: "orders", Offset: 3, LastAt: c.at.Add(-time.Hour)}},
		Events: []Event{{ID: "newer"}, {ID: "older"}},
	}
	l := New(c.now)
	l.Observe(c.newBatch("orders", 40, 0))
	if !l.NeedsPrevious() {
		t.Error("it needs no report of the previous owner")
	}
	l.Adopt(old)

	r := mustReport(t, l)
	if l.NeedsPrevious() || len(r.Topics) != 2 || r.Topics[0].Topic != "orders" || r.Topics[0].Offset != 40 {
		t.Errorf("%+v", r.Topics)
	}
	if rare := r.Topics[1]; rare.Rate != 0 || rare.Offset != 5 || rare.Partition != 1 || !rare.LastAt.Equal(old.Topics[0].LastAt) {
		t.Errorf("%+v", rare)
	}
	if len(r.Events) != 2 || r.Events[0].ID != "newer" {
		t.Errorf("%+v", r.Events)
	}
}

func TestObservingAllocatesNothing(t *testing.T) {
	c := newClock()
	l := New(c.now)
	b := c.newBatch("orders", 0, make([]time.Duration, 512)...)
	recs := []record.Record{{Topic: "orders"}}
	var view envelope.View

	// The first events of an interval are samples; none is left to take after this loop.
	l.Observe(b)
	for l.Sample(c.at, recs, &view, nil, nil, 1) != nil {
	}

	if n := testing.AllocsPerRun(100, func() {
		l.Observe(b)
		l.Sample(c.at, recs, &view, nil, nil, 1)
	}); n != 0 {
		t.Errorf("%v allocations for a batch and an event that is not sampled", n)
	}
}

// Each bucket contains the latencies up to its end, and is at most a quarter wide.
func TestBucketsOfLatencies(t *testing.T) {
	t.Parallel()
	for _, d := range []time.Duration{0, 128 * time.Microsecond, 159 * time.Microsecond, 160 * time.Microsecond, time.Millisecond, 4 * time.Millisecond, time.Second, time.Hour} {
		var h histogram
		h.add(d, 3)
		if got := h.quantile(0.99); got <= d || d >= 128*time.Microsecond && float64(got) > 1.251*float64(d) {
			t.Errorf("%s is counted as %s", d, got)
		}
	}

	var h histogram
	h.add(100*24*time.Hour, 1)
	if got := h.quantile(0.5); got < time.Hour {
		t.Errorf("100 days are counted as %s", got)
	}
	if new(histogram).quantile(0.5) != 0 {
		t.Error("nothing has a latency")
	}
}

// BenchmarkObserve measures the cost of an ack: a batch of 64 records, committed in four
// milliseconds.
func BenchmarkObserve(b *testing.B) {
	c := newClock()
	l := New(c.now)
	took := make([]time.Duration, 64)
	for i := range took {
		took[i] = time.Duration(i/16) * time.Millisecond
	}
	batch := c.newBatch("orders", 0, took...)
	b.ReportAllocs()
	for b.Loop() {
		l.Observe(batch)
	}
}

// BenchmarkSample measures the cost of an event that is not sampled.
func BenchmarkSample(b *testing.B) {
	c := newClock()
	l := New(c.now)
	recs := []record.Record{{Topic: "orders"}}
	var view envelope.View
	for l.Sample(c.at, recs, &view, nil, nil, 1) != nil {
	}
	b.ReportAllocs()
	for b.Loop() {
		l.Sample(c.at, recs, &view, nil, nil, 1)
	}
}

// A report has the records of the last hour in parts of three minutes. The next owner continues them, and a reader moves them to
// its own time.
func TestRecordsOfTheLastHour(t *testing.T) {
	t.Parallel()
	c := newClock()
	l := New(c.now)
	l.Observe(c.newBatch("orders", 0, make([]time.Duration, 7)...))
	c.at = c.at.Add(6 * time.Minute)
	l.Observe(c.newBatch("orders", 7, make([]time.Duration, 2)...))
	first := mustReport(t, l)
	if got := first.Topics[0].Recent; len(got) != 20 || got[17] != 7 || got[18] != 0 || got[19] != 2 {
		t.Fatalf("records of the last hour: %v", got)
	}

	c.at = c.at.Add(3 * time.Minute)
	next := New(c.now)
	next.Observe(c.newBatch("orders", 9, 0))
	next.Adopt(first)
	if got := mustReport(t, next).Topics[0].Recent; got[16] != 7 || got[18] != 2 || got[19] != 1 {
		t.Errorf("after a takeover: %v", got)
	}

	topic := first.Topics[0]
	topic.AlignRecent(first.At, first.At.Add(30*time.Minute))
	if got := topic.Recent; len(got) != 20 || got[7] != 7 || got[9] != 2 || got[19] != 0 {
		t.Errorf("half an hour later: %v", got)
	}
	topic = first.Topics[0]
	if topic.AlignRecent(first.At, first.At.Add(2*time.Hour)); topic.Recent != nil || topic.RecentP99 != nil {
		t.Errorf("two hours later: %v", topic)
	}
	if p50, p99 := l.Latency(); p50 != 0 || p99 != 0 {
		t.Errorf("latency without a record in the last minute: %v, %v", p50, p99)
	}
	if p50, p99 := next.Latency(); p50 <= 0 || p99 <= 0 {
		t.Errorf("latency of the last minute: %v, %v", p50, p99)
	}
}

// The latency of a topic over the last hour is the greatest that its owners have reported in each part.
func TestLatencyOfTheLastHour(t *testing.T) {
	t.Parallel()
	c := newClock()
	l := New(c.now)
	l.Observe(c.newBatch("orders", 0, 4*time.Millisecond, 4*time.Millisecond, 900*time.Millisecond))
	slow := mustReport(t, l)
	c.at = c.at.Add(90 * time.Second)
	l.Observe(c.newBatch("orders", 3, time.Millisecond))
	if got := mustReport(t, l).Topics[0]; got.RecentP50[19] != slow.Topics[0].RecentP50[19] && got.RecentP50[18] != slow.Topics[0].RecentP50[19] || got.P99MS > 10 {
		t.Errorf("a faster minute: %+v, before %+v", got, slow.Topics[0])
	}

	c.at = c.at.Add(6 * time.Minute)
	next := New(c.now)
	next.Observe(c.newBatch("orders", 4, 2*time.Millisecond))
	next.Adopt(slow)
	got := mustReport(t, next).Topics[0]
	if last := got.RecentP99[19]; last < 2000 || last > 2500 {
		t.Errorf("the new owner's latency: %v", got.RecentP99)
	}
	if slices.Max(got.RecentP99) < 900_000 || slices.Max(got.RecentP50) > 5000 {
		t.Errorf("after a takeover: p50 %v, p99 %v", got.RecentP50, got.RecentP99)
	}
}
