package process_test

import (
	"compress/gzip"
	"context"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.opentelemetry.io/otel/attribute"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
	"go.opentelemetry.io/otel/trace"
	tracepb "go.opentelemetry.io/proto/otlp/trace/v1"
	"google.golang.org/protobuf/proto"

	"github.com/outrelay/outrelay/internal/lab/devstack"
	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/pkg/consumer"
	"github.com/outrelay/outrelay/pkg/event"
	"github.com/outrelay/outrelay/pkg/telemetry"
	"go.opentelemetry.io/otel"
)

// receiver is an OTLP collector over real HTTP that keeps spans by the id of their event.
type receiver struct {
	*httptest.Server
	mu      sync.Mutex
	spans   map[string]*tracepb.Span
	metrics int
}

func newReceiver(t *testing.T) *receiver {
	t.Helper()
	r := &receiver{spans: map[string]*tracepb.Span{}}
	r.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		z, err := gzip.NewReader(req.Body)
		if err != nil {
			t.Error(err)
			return
		}
		body, err := io.ReadAll(z)
		if err != nil {
			t.Error(err)
		}
		r.mu.Lock()
		defer r.mu.Unlock()
		if strings.HasSuffix(req.URL.Path, "/v1/metrics") {
			r.metrics++
			return
		}
		var data tracepb.TracesData
		if err := proto.Unmarshal(body, &data); err != nil {
			t.Error(err)
		}
		for _, rs := range data.GetResourceSpans() {
			for _, ss := range rs.GetScopeSpans() {
				for _, s := range ss.GetSpans() {
					for _, kv := range s.GetAttributes() {
						if kv.GetKey() == "messaging.message.id" {
							r.spans[kv.GetValue().GetStringValue()] = s
						}
					}
				}
			}
		}
	}))

	t.Cleanup(r.Close)
	return r
}

func (r *receiver) findSpan(id string) *tracepb.Span {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.spans[id]
}

// linkOf returns the span that s is linked to.
func linkOf(t *testing.T, s *tracepb.Span) trace.SpanContext {
	t.Helper()
	if len(s.GetLinks()) != 1 || s.GetKind() != tracepb.Span_SPAN_KIND_PRODUCER {
		t.Fatalf("span %v", s)
	}
	return trace.NewSpanContext(trace.SpanContextConfig{TraceID: trace.TraceID(s.GetLinks()[0].GetTraceId()), SpanID: trace.SpanID(s.GetLinks()[0].GetSpanId())})
}

func sameSpan(a, b trace.SpanContext) bool {
	return a.TraceID() == b.TraceID() && a.SpanID() == b.SpanID() && a.IsValid()
}

// TestTracesJoinUpEndToEnd follows an event from the span in which a service appends it, through the relay and a consumer,
// whose handler appends another, which the relay sends again.
func TestTracesJoinUpEndToEnd(t *testing.T) {
	t.Parallel()
	b := setup(t)
	collector := newReceiver(t)
	kept := tracetest.NewInMemoryExporter()
	provider := sdktrace.NewTracerProvider(sdktrace.WithSyncer(kept))
	otel.SetTracerProvider(provider)
	service := provider.Tracer("shop")
	b.start("otel.endpoint="+collector.URL, "otel.metrics_interval=1s", "record.preset=plain")

	placed, packed := event.New(event.Aggregate{Type: "order", ID: "o-1"}, "OrderPlaced", event.Bytes("", []byte("x")), event.WithID("placed")), event.New(event.Aggregate{Type: "parcel", ID: "o-1"}, "ParcelPacked", event.Bytes("", []byte("x")), event.WithID("packed"))
	quiet := event.New(event.Aggregate{Type: "order", ID: "o-1"}, "Unsampled", event.Bytes("", []byte("x")), event.WithID("quiet"))
	c, err := consumer.New("shipping-"+b.topic, b.db, consumer.WithBrokers(stacktest.Brokers(t)...), consumer.WithTopics(b.topic),
		consumer.WithTelemetry(telemetry.OTel()))
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Handle("packing", consumer.Func(func(ctx context.Context, _ *consumer.Message) error {
		return b.box.Append(ctx, packed)
	}, "OrderPlaced")); err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- c.Run(ctx) }()
	defer func() {
		stop()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	}()

	placing, span := service.Start(t.Context(), "place order")
	if err := b.box.Transaction(placing, func(ctx context.Context) error { return b.box.Append(ctx, placed) }); err != nil {
		t.Fatal(err)
	}
	span.End()
	unsampled := trace.NewSpanContext(trace.SpanContextConfig{TraceID: trace.TraceID{1}, SpanID: trace.SpanID{1}})
	if err := b.box.Append(trace.ContextWithSpanContext(t.Context(), unsampled), quiet); err != nil {
		t.Fatal(err)
	}
	stacktest.Eventually(t, "the spans of both events are exported", func() bool { return collector.findSpan("placed") != nil && collector.findSpan("packed") != nil })

	if got := linkOf(t, collector.findSpan("placed")); !sameSpan(got, span.SpanContext()) {
		t.Errorf("the relay's span is linked to %v, the service's is %v", got, span.SpanContext())
	}
	var process *tracetest.SpanStub
	// The span ends after the append of its handler.
	stacktest.Eventually(t, "the consumer's span has ended", func() bool {
		for _, s := range kept.GetSpans() {
			if s.Name == "process packing" {
				process = &s
			}
		}
		return process != nil
	})
	if process.SpanKind != trace.SpanKindConsumer || len(process.Links) != 1 || !sameSpan(process.Links[0].SpanContext, span.SpanContext()) {
		t.Fatalf("the consumer's span: %+v", process)
	}
	if got := linkOf(t, collector.findSpan("packed")); !sameSpan(got, process.SpanContext) {
		t.Errorf("the span of the appended event is linked to %v, the handler's is %v", got, process.SpanContext)
	}
	if want := attribute.String("messaging.destination.name", b.topic); !containsAttribute(process.Attributes, want) {
		t.Errorf("the consumer names another destination: %v", process.Attributes)
	}
	for _, kv := range collector.findSpan("placed").GetAttributes() {
		if kv.GetKey() == "messaging.destination.name" && kv.GetValue().GetStringValue() != b.topic {
			t.Errorf("the relay names the destination %v", kv.GetValue())
		}
	}
	stacktest.Eventually(t, "metrics are exported", func() bool { collector.mu.Lock(); defer collector.mu.Unlock(); return collector.metrics > 0 })
	if collector.findSpan("quiet") != nil {
		t.Error("a trace that the service did not sample has a span")
	}
}

func containsAttribute(list []attribute.KeyValue, want attribute.KeyValue) bool {
	for _, a := range list {
		if a == want {
			return true
		}
	}
	return false
}

// freeAddress returns an address without a listener.
func freeAddress(t *testing.T) string {
	t.Helper()
	addr, err := devstack.FreeAddress()
	if err != nil {
		t.Fatal(err)
	}
	return addr
}

func scrape(t *testing.T, url string) string {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, url, nil)
	if err != nil {
		t.Fatal(err)
	}

	req.Header.Set("Accept", "application/openmetrics-text; version=1.0.0")
	resp, err := (&http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: 10 * time.Second}).Do(req)
	if err != nil {
		// The server does not listen yet.
		return ""
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		// The server does not respond in time.
		return ""
	}

	return string(body)
}

// TestScrapeHasExemplarsAndFigures: without any collector a scrape has the trace of a slow event, and the counts of what
// lies in the collections.
func TestScrapeHasExemplarsAndFigures(t *testing.T) {
	t.Parallel()
	b := setup(t)
	address := freeAddress(t)
	b.start("http.listen="+address, "node=n1")
	if _, err := b.db.Collection("outbox").InsertMany(t.Context(), []any{bson.D{{Key: "_id", Value: "x"}}, bson.D{{Key: "_id", Value: "y"}}}); err != nil {
		t.Fatal(err)
	}
	const traceID = "0af7651916cd43dd8448eb211c80319c"
	if err := b.box.Append(t.Context(), event.New(event.Aggregate{Type: "order", ID: "o-1"}, "Placed", event.Bytes("", []byte("x")), event.WithHeader("traceparent", []byte("00-"+traceID+"-b7ad6b7169203331-01")))); err != nil {
		t.Fatal(err)
	}
	if err := b.box.Append(t.Context(), event.New(event.Aggregate{Type: "order", ID: "o-2"}, "Later", event.Bytes("", []byte("x")), event.WithDueAt(time.Now().Add(time.Hour)))); err != nil {
		t.Fatal(err)
	}

	label := `{collection="` + b.db.Name() + `.outbox"}`
	var last string
	defer func() {
		if t.Failed() {
			t.Log(last)
		}
	}()

	for _, want := range []string{
		`trace_id="` + traceID + `"`, `outrelay_watcher_info{node="n1",watcher="default"} 1.0`, `outrelay_nodes{state="alive"} 1.0`,
		"outrelay_scheduled_envelopes" + label + " 1.0", "outrelay_dead_letters_stored" + label + " 2.0", "outrelay_pending_envelopes" + label,
		"outrelay_missing_indexes" + label, "outrelay_oldest_pending_seconds" + label, "outrelay_problem_seconds", "outrelay_lease_owner 1.0", "go_goroutines", "process_resident_memory_bytes",
	} {
		stacktest.Eventually(t, "the metrics contain "+want, func() bool { last = scrape(t, "http://"+address+"/metrics"); return strings.Contains(last, want) })
	}

	stacktest.Eventually(t, "the process is ready and its health is ok", func() bool {
		last = scrape(t, "http://"+address+"/readyz")
		return strings.Contains(last, `"ready":true`) && strings.Contains(last, `"health":{"status":"ok"`)
	})
}
