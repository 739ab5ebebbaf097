package tracing

import (
	"bytes"
	"compress/gzip"
	"context"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"go.opentelemetry.io/otel/trace"
	metricspb "go.opentelemetry.io/proto/otlp/metrics/v1"
	tracepb "go.opentelemetry.io/proto/otlp/trace/v1"
	"go.uber.org/goleak"
	"google.golang.org/protobuf/proto"

	"github.com/outrelay/outrelay/internal/base/metrics"
	"github.com/outrelay/outrelay/internal/contract/record"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"

func newHeaders(pairs ...string) (out []record.Header) {
	for i := 0; i < len(pairs); i += 2 {
		out = append(out, record.Header{Key: []byte(pairs[i]), Value: []byte(pairs[i+1])})
	}
	return out
}

func TestStoredContext(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		headers []record.Header
		ok      bool
	}{
		"none":                 {newHeaders("id", "1"), false},
		"sampled":              {newHeaders("id", "1", "traceparent", parent), true},
		"other case":           {newHeaders("Traceparent", parent), true},
		"with a state":         {newHeaders("traceparent", parent, "tracestate", "a=1"), true},
		"the first counts":     {newHeaders("traceparent", "rubbish", "traceparent", parent), false},
		"not sampled":          {newHeaders("traceparent", parent[:53]+"00"), false},
		"other flags":          {newHeaders("traceparent", parent[:53]+"03"), true},
		"capitals":             {newHeaders("traceparent", strings.ToUpper(parent)), false},
		"no trace":             {newHeaders("traceparent", "00-00000000000000000000000000000000-b7ad6b7169203331-01"), false},
		"no span":              {newHeaders("traceparent", "00-0af7651916cd43dd8448eb211c80319c-0000000000000000-01"), false},
		"forbidden version":    {newHeaders("traceparent", "ff"+parent[2:]), false},
		"later version":        {newHeaders("traceparent", "01"+parent[2:]+"-more"), true},
		"version 00 is longer": {newHeaders("traceparent", parent+"-more"), false},
		"short":                {newHeaders("traceparent", parent[:54]), false},
		"not hexadecimal":      {newHeaders("traceparent", "0g"+parent[2:]), false},
		"empty":                {newHeaders("traceparent", ""), false},
	} {
		got, ok := fromHeaders(c.headers)
		if ok != c.ok || ok && (got.TraceID.String() != parent[3:35] || got.SpanID.String() != parent[36:52]) {
			t.Errorf("%s: %v %+v", name, ok, got)
		}
	}

	c, _ := fromHeaders(newHeaders("traceparent", parent, "tracestate", "a=1"))
	if sc := c.spanContext(); !sc.IsValid() || !sc.IsRemote() || !sc.IsSampled() || sc.TraceState().Get("a") != "1" {
		t.Errorf("%+v", sc)
	}
	if c, _ = fromHeaders(newHeaders("traceparent", parent, "tracestate", "=;=")); !c.spanContext().IsValid() {
		t.Error("a broken tracestate costs the link")
	}
}

func FuzzStored(f *testing.F) {
	f.Add([]byte(parent))
	f.Add([]byte("00-"))
	f.Fuzz(func(t *testing.T, v []byte) {
		c, ok := fromHeaders([]record.Header{{Key: []byte("traceparent"), Value: v}})
		if ok != (c.TraceID.IsValid() && c.SpanID.IsValid()) {
			t.Errorf("%q: %v %+v", v, ok, c)
		}
	})
}

func TestEveryProcessChoosesTheSameTraces(t *testing.T) {
	t.Parallel()
	n := 0
	for i := range 10_000 {
		var id trace.TraceID
		id[8], id[9] = byte(i>>8)*7, byte(i)
		if isSampled(id, 25) {
			n++
			if !isSampled(id, 26) {
				t.Fatal("a larger share leaves out a trace of a smaller one")
			}
		}
		if isSampled(id, 0) || !isSampled(id, 100) {
			t.Fatal("none is not none, or all is not all")
		}
	}

	if n < 1500 || n > 3500 {
		t.Errorf("%d of 10000 for 25 %%", n)
	}
}

func TestRateOfSpans(t *testing.T) {
	t.Parallel()
	l := newSpanLimit(10)
	allow := func(at time.Time, n int) bool { return l.AllowN(at, min(n, l.Burst())) }
	at := time.Unix(5, 0)
	for i, want := range []bool{true, true, true, false, false} {
		if allow(at, 3) != want {
			t.Errorf("take %d", i)
		}
	}
	if !allow(at.Add(time.Second), 50) || allow(at.Add(time.Second), 1) {
		t.Error("in the next second one of any size goes, and then none")
	}
}

// TestHotPathOffAllocatesNothing tests events that are not followed, without an exporter and with one.
func TestHotPathOffAllocatesNothing(t *testing.T) {
	traced := []record.Record{{Topic: "orders", Value: []byte("x"), Headers: newHeaders("id", "1", "traceparent", parent, "tracestate", "a=1")}}
	plain := []record.Record{{Topic: "orders", Value: []byte("x"), Headers: newHeaders("id", "1", "type", "OrderPlaced")}}
	shop, outbox := []byte("shop"), []byte("outbox")
	now := func() time.Time { return time.Unix(100, 0) }

	none := NewTap(nil, nil, now)
	resting := NewTap(nil, func(time.Duration, string, string) {}, now)
	resting.next.Store(time.Unix(1000, 0).UnixNano())
	var absent *Tap

	for name, tap := range map[string]*Tap{"no tap": absent, "off": none, "exemplars, not now": resting, "a share of none": NewTap(&Exporter{cfg: Config{}}, nil, now)} {
		if n := testing.AllocsPerRun(100, func() {
			if tap.Begin(traced, shop, outbox, 5) != nil || tap.Begin(plain, shop, outbox, 5) != nil {
				t.Fatal("it is followed")
			}
		}); n != 0 {
			t.Errorf("%s: %v allocations", name, n)
		}
	}
}

func TestExemplarsAreRare(t *testing.T) {
	t.Parallel()
	clock := time.Unix(100, 0)
	m := metrics.New("")
	tap := NewTap(nil, m.PublishLatency.Exemplar, func() time.Time { return clock })
	recs := []record.Record{{Topic: "orders", Headers: newHeaders("traceparent", parent)}}
	taken := 0
	for range 300 {
		clock = clock.Add(time.Millisecond)
		if d := tap.Begin(recs, nil, nil, clock.Add(-4*time.Millisecond).UnixMilli()); d != nil {
			taken++
			d.Acked(record.TopicPartition{Topic: "orders"}, 7)
		}
	}

	if taken != 3 {
		t.Errorf("%d exemplars in 300 ms", taken)
	}
}

// collector is an OTLP receiver over real HTTP.
type collector struct {
	*httptest.Server
	t       *testing.T
	mu      sync.Mutex
	status  int
	auth    []string
	spans   []*tracepb.Span
	about   string
	metrics map[string]*metricspb.Metric
	more    chan struct{}
}

func newCollector(t *testing.T) *collector {
	t.Helper()
	c := &collector{t: t, status: 200, metrics: map[string]*metricspb.Metric{}, more: make(chan struct{}, 1000)}
	c.Server = httptest.NewServer(http.HandlerFunc(c.receive))
	t.Cleanup(c.Close)
	return c
}

func (c *collector) receive(w http.ResponseWriter, r *http.Request) {
	defer func() { c.more <- struct{}{} }()
	z, err := gzip.NewReader(r.Body)
	if err != nil {
		c.t.Error(err)
		return
	}

	body, err := io.ReadAll(z)
	if err != nil {
		c.t.Error(err)
	}

	c.mu.Lock()
	defer c.mu.Unlock()
	c.auth = append(c.auth, r.Header.Get("Authorization"))
	if c.status != 200 {
		w.WriteHeader(c.status)
		return
	}

	switch r.URL.Path {
	case "/base/v1/traces":
		// This message has the format of the request.
		var data tracepb.TracesData
		if err := proto.Unmarshal(body, &data); err != nil {
			c.t.Error(err)
		}
		for _, rs := range data.GetResourceSpans() {
			c.about = rs.GetResource().String()
			for _, ss := range rs.GetScopeSpans() {
				c.spans = append(c.spans, ss.GetSpans()...)
			}
		}
	case "/base/v1/metrics":
		var data metricspb.MetricsData
		if err := proto.Unmarshal(body, &data); err != nil {
			c.t.Error(err)
		}
		for _, rm := range data.GetResourceMetrics() {
			for _, sm := range rm.GetScopeMetrics() {
				for _, m := range sm.GetMetrics() {
					c.metrics[m.GetName()] = m
				}
			}
		}
	default:
		c.t.Errorf("a request for the path %s, want traces or metrics", r.URL.Path)
	}

	w.Header().Set("Content-Type", "application/x-protobuf")
}

// waitReceived blocks until the received data satisfies ok.
func (c *collector) waitReceived(ok func() bool) {
	c.t.Helper()
	deadline := time.After(30 * time.Second)
	for {
		c.mu.Lock()
		done := ok()
		c.mu.Unlock()

		if done {
			return
		}

		select {
		case <-c.more:
		case <-deadline:
			c.t.Fatal("it never came")
		}
	}
}

type exports struct {
	mu sync.Mutex
	n  map[string]int
}

func (e *exports) add(signal string, err error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.n == nil {
		e.n = map[string]int{}
	}
	if err != nil {
		signal += " failed"
	}
	e.n[signal]++
}

// runExporter runs an Exporter until the function that it returns is called.
func runExporter(t *testing.T, cfg Config) (*Exporter, func()) {
	t.Helper()
	e, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}

	e.flushTimeout = time.Minute
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- e.Run(ctx) }()
	for deadline := time.Now().Add(30 * time.Second); cfg.SamplePercent > 0 && e.tracer.Load() == nil; {
		if time.Now().After(deadline) {
			t.Fatal("it does not start")
		}
		<-time.After(time.Millisecond)
	}

	stop := sync.OnceFunc(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})

	t.Cleanup(stop)
	return e, stop
}

func attributesOf(s *tracepb.Span) map[string]string {
	m := map[string]string{}
	for _, kv := range s.GetAttributes() {
		m[kv.GetKey()] = kv.GetValue().GetStringValue()
		if n := kv.GetValue().GetIntValue(); n != 0 {
			m[kv.GetKey()] = strconv.FormatInt(n, 10)
		}
		if kv.GetValue().GetDoubleValue() > 0 {
			m[kv.GetKey()] = "a number"
		}
	}
	return m
}

func TestSpansReachACollector(t *testing.T) {
	t.Parallel()
	c := newCollector(t)
	var exported exports
	m := metrics.New("1.2.3")
	e, stop := runExporter(t, Config{
		Endpoint: c.URL + "/base/", Token: "hunter2hunter2", SamplePercent: 100, SpansPerSecond: 100, MetricsInterval: 50 * time.Millisecond,
		Version: "1.2.3", Node: "n1", Watcher: "orders", Gatherer: m.Registry, OnExport: exported.add, Log: slog.New(slog.DiscardHandler),
	})

	tap := NewTap(e, m.PublishLatency.Exemplar, time.Now)
	shared := newHeaders("__debezium.context.taskId", "0", "id", "0190-e1", "traceparent", parent, "tracestate", "a=1")
	recs := []record.Record{{Topic: "orders", Key: []byte("secret-key"), Value: []byte("secret-payload"), Headers: shared}, {Topic: "audit", Headers: shared}, {Topic: "parked", Headers: shared}}
	d := tap.Begin(recs, []byte("shop"), []byte("outbox"), time.Now().Add(-20*time.Millisecond).UnixMilli())
	d.Acked(record.TopicPartition{Topic: "orders", Partition: 3}, 41)
	d.Rejected("audit", "message_too_large")
	d.NotSent("parked", "parked")
	// Another ack adds no span.
	d.Acked(record.TopicPartition{Topic: "orders", Partition: 3}, 41)
	m.ObserveLatency(20*time.Millisecond, 1)
	if tap.Begin([]record.Record{{Topic: "orders", Headers: newHeaders("id", "2", "traceparent", parent[:53]+"00")}}, nil, nil, 1) != nil {
		t.Error("an event that the service did not sample is followed")
	}

	stop() // exports the remaining spans
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.spans) != 3 {
		t.Fatalf("%d spans", len(c.spans))
	}

	byTopic := map[string]*tracepb.Span{}
	for _, s := range c.spans {
		byTopic[attributesOf(s)["messaging.destination.name"]] = s
		if s.GetKind() != tracepb.Span_SPAN_KIND_PRODUCER || len(s.GetLinks()) != 1 || len(s.GetParentSpanId()) != 0 {
			t.Errorf("span %v", s)
			continue
		}
		l := s.GetLinks()[0]
		if trace.TraceID(l.GetTraceId()).String() != parent[3:35] || trace.SpanID(l.GetSpanId()).String() != parent[36:52] {
			t.Errorf("link %v", l)
		}
		if strings.Contains(s.String(), "secret") {
			t.Errorf("a span contains forbidden attributes: %v", s)
		}
	}

	s := byTopic["orders"]
	got := attributesOf(s)
	for key, want := range map[string]string{
		"messaging.system": `kafka`, "messaging.operation.name": `send`, "messaging.operation.type": `send`,
		"messaging.destination.partition.id": `3`, "messaging.kafka.offset": "41", "messaging.message.id": `0190-e1`,
		"messaging.message.body.size": "14", "outrelay.collection": `shop.outbox`,
	} {
		if got[key] != want {
			t.Errorf("%s is %q, want %q", key, got[key], want)
		}
	}
	if s.GetName() != "send orders" || s.GetStatus().GetCode() != tracepb.Status_STATUS_CODE_UNSET || got["outrelay.commit_to_ack_ms"] == "" {
		t.Errorf("span %v", s)
	}
	if s := byTopic["audit"]; s.GetStatus().GetCode() != tracepb.Status_STATUS_CODE_ERROR || s.GetStatus().GetMessage() != "message_too_large" {
		t.Errorf("rejected: %v", s.GetStatus())
	}
	if got := attributesOf(byTopic["parked"])["outrelay.state"]; got != "parked" {
		t.Errorf("parked: %q", got)
	}

	for _, want := range []string{"outrelay", "1.2.3", "n1", "orders"} {
		if !strings.Contains(c.about, `"`+want+`"`) {
			t.Errorf("the resource lacks %q: %s", want, c.about)
		}
	}
	if c.auth[0] != "Bearer hunter2hunter2" {
		t.Errorf("authorization %q", c.auth[0])
	}
	if exported.n[signalTraces] == 0 || exported.n[signalMetrics] == 0 {
		t.Errorf("exports %v", exported.n)
	}

	h := c.metrics["outrelay_publish_latency_seconds"].GetHistogram().GetDataPoints()
	if len(h) != 1 || h[0].GetCount() != 1 || len(h[0].GetExemplars()) != 1 || trace.TraceID(h[0].GetExemplars()[0].GetTraceId()).String() != parent[3:35] {
		t.Errorf("the histogram and its exemplar: %v", h)
	}
	if c.metrics["outrelay_lag_seconds"] == nil || c.metrics["go_goroutines"] == nil {
		t.Error("metrics are missing")
	}
}

// TestACollectorThatFails is reported once, and once when it works again.
func TestACollectorThatFails(t *testing.T) {
	t.Parallel()
	c := newCollector(t)
	// The exporter does not retry a request after this status.
	c.status = 400
	var exported exports
	var log locked
	runExporter(t, Config{
		Endpoint: strings.Replace(c.URL, "http://", "http://u:hunter2hunter2@", 1) + "/base", MetricsInterval: 20 * time.Millisecond,
		Gatherer: metrics.New("").Registry, OnExport: exported.add, Log: slog.New(slog.NewTextHandler(&log, nil)),
	})

	c.waitReceived(func() bool { return len(c.auth) >= 3 })
	c.mu.Lock()
	c.status = 200
	c.mu.Unlock()
	c.waitReceived(func() bool { return c.metrics["outrelay_lag_seconds"] != nil && c.metrics["go_goroutines"] != nil })
	var seen int
	c.waitReceived(func() bool { seen = len(c.auth); return true })
	// By then, the response to the request before has been reported.
	c.waitReceived(func() bool { return len(c.auth) >= seen+2 })
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.auth[0] != "Basic dTpodW50ZXIyaHVudGVyMg==" {
		t.Errorf("authorization %q", c.auth[0])
	}

	text := log.String()
	if strings.Count(text, "cannot export to the collector") != 1 || strings.Count(text, "again") != 1 || strings.Contains(text, "hunter2") {
		t.Errorf("log:\n%s", text)
	}
}

// roundTripper is a transport of another type than that of the library.
type roundTripper struct{ http.RoundTripper }

// A service in which the relay is embedded may have replaced the transport of its process.
func TestTheTransportOfTheServiceIsNotUsed(t *testing.T) { //nolint:paralleltest // it replaces a variable of the process
	before := http.DefaultTransport
	http.DefaultTransport = roundTripper{}
	defer func() { http.DefaultTransport = before }()
	exporter, err := New(Config{Endpoint: newCollector(t).URL})
	if err != nil {
		t.Fatal(err)
	}

	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := exporter.Run(ctx); err != nil {
		t.Error(err)
	}
}

type locked struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (l *locked) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.buf.Write(p)
}

func (l *locked) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.buf.String()
}

func TestOff(t *testing.T) {
	t.Parallel()
	e, err := New(Config{})
	if e != nil || err != nil {
		t.Fatalf("%v %v", e, err)
	}
	if err := e.Run(t.Context()); err != nil { // at once
		t.Error(err)
	}

	for _, bad := range []string{"collector:4318", "ftp://x", "http://", "http://u:hunter2hunter2@x:port"} {
		if _, err := New(Config{Endpoint: bad}); err == nil || strings.Contains(err.Error(), "hunter2") {
			t.Errorf("%q: %v", bad, err)
		}
	}
}
