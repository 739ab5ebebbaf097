package telemetry_test

import (
	"context"
	"errors"
	"strings"
	"sync"
	"testing"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"
	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/baggage"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/metric"
	metricnoop "go.opentelemetry.io/otel/metric/noop"
	sdkmetric "go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/metric/metricdata"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
	"go.opentelemetry.io/otel/trace"
	tracenoop "go.opentelemetry.io/otel/trace/noop"

	"github.com/outrelay/outrelay/pkg/event"
	"github.com/outrelay/outrelay/pkg/telemetry"
)

func TestOpenTelemetryGetsEveryMetric(t *testing.T) {
	t.Parallel()
	reader := sdkmetric.NewManualReader()
	everything(newOTel(tracenoop.NewTracerProvider(), sdkmetric.NewMeterProvider(sdkmetric.WithReader(reader))))

	var data metricdata.ResourceMetrics
	if err := reader.Collect(t.Context(), &data); err != nil {
		t.Fatal(err)
	}
	got := map[string]float64{}
	add := func(name string, labels attribute.Set, value float64) {
		for _, l := range labels.ToSlice() {
			name += " " + l.Value.AsString()
		}
		got[name] = value
	}
	for _, m := range data.ScopeMetrics[0].Metrics {
		name := strings.TrimPrefix(m.Name, "outrelay_")
		switch points := m.Data.(type) {
		case metricdata.Sum[int64]:
			for _, p := range points.DataPoints {
				add(name+"_total", p.Attributes, float64(p.Value))
			}
		case metricdata.Gauge[float64]:
			for _, p := range points.DataPoints {
				add(name, p.Attributes, p.Value)
			}
		case metricdata.Histogram[float64]:
			for _, p := range points.DataPoints {
				add(name, p.Attributes, float64(p.Count))
			}
		}
	}

	// OpenTelemetry sorts labels by name.
	want := map[string]float64{}
	for name, value := range wantEverything {
		name = strings.Replace(name, "billing pay retry", "retry billing pay", 1)
		name = strings.Replace(name, "billing pay rejected", "rejected billing pay", 1)
		name = strings.Replace(name, "billing orders 1", "billing 1 orders", 1)
		want[name] = value
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("metrics (-want +got):\n%s", diff)
	}
}

// traced returns a message with the headers traceparent and baggage, unless they are empty.
func traced(id, parent, bag string) telemetry.Message {
	m := telemetry.Message{ID: id, Name: "OrderPlaced", Number: 1}
	if parent != "" {
		m.Headers = append(m.Headers, event.Header{Key: "traceparent", Value: []byte(parent)})
	}
	if bag != "" {
		m.Headers = append(m.Headers, event.Header{Key: "baggage", Value: []byte(bag)})
	}
	return m
}

const parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"

// globals are the providers of the process, which OTel reads.
var globals sync.Mutex

func newOTel(tracers trace.TracerProvider, meters metric.MeterProvider) telemetry.Sink {
	globals.Lock()
	defer globals.Unlock()
	otel.SetTracerProvider(tracers)
	otel.SetMeterProvider(meters)
	return telemetry.OTel()
}

func newTraced() (telemetry.Sink, *tracetest.SpanRecorder) {
	spans := tracetest.NewSpanRecorder()
	return newOTel(sdktrace.NewTracerProvider(sdktrace.WithSpanProcessor(spans)), metricnoop.NewMeterProvider()), spans
}

func TestASpanIsLinkedToItsProducers(t *testing.T) {
	t.Parallel()
	s, spans := newTraced()
	ctx, end := s.Start(t.Context(), telemetry.Attempt{Group: "g", Handler: "billing", Topic: "orders", Messages: []telemetry.Message{
		traced("1", parent, "tenant=x"), traced("2", "", ""), traced("3", "00-1af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", ""),
	}})
	if baggage.FromContext(ctx).Len() != 0 {
		t.Errorf("baggage of several messages: got %v, want none", baggage.FromContext(ctx))
	}
	own := trace.SpanContextFromContext(ctx)
	end(nil)

	sp := spans.Ended()[0]
	if sp.Name() != "process billing" || sp.Status().Code != codes.Unset || sp.Parent().IsValid() ||
		sp.SpanKind() != trace.SpanKindConsumer || sp.SpanContext().SpanID() != own.SpanID() {
		t.Errorf("span: got %+v, want the root span of a consumer without an error", sp)
	}
	links := sp.Links()
	if len(links) != 2 || links[0].SpanContext.TraceID().String() != "0af7651916cd43dd8448eb211c80319c" {
		t.Errorf("links: got %+v, want two, the first to the first producer", links)
	}

	headers := s.Inject(ctx)
	if len(headers) != 1 || headers[0].Key != "traceparent" || !strings.Contains(string(headers[0].Value), own.TraceID().String()) {
		t.Errorf("headers of an event that the handler appends: %v", headers)
	}
}

func TestASpanOfOneMessageHasItsBaggageAndOutcome(t *testing.T) {
	t.Parallel()
	s, spans := newTraced()
	ctx, end := s.Start(t.Context(), telemetry.Attempt{Handler: "billing", Messages: []telemetry.Message{traced("1", parent, "tenant=x")}})
	if got := baggage.FromContext(ctx).Member("tenant").Value(); got != "x" {
		t.Errorf("baggage: got %q, want x", got)
	}
	end(errors.New("timeout"))
	if got := spans.Ended()[0].Status(); got.Code != codes.Error || got.Description != "timeout" {
		t.Errorf("status %+v, want the error timeout", got)
	}
}

// An exporter drops all spans of its batch because of one text that is not UTF-8. Producers choose ids and names.
func TestTextsOfSpansAreValid(t *testing.T) {
	t.Parallel()
	s, spans := newTraced()
	bad := telemetry.Message{ID: "\xff\xfe", Name: "a\xc3", Headers: traced("1", parent, "").Headers}
	for _, list := range [][]telemetry.Message{{bad}, {bad, bad}} {
		_, end := s.Start(t.Context(), telemetry.Attempt{Handler: "billing", Topic: "orders", Messages: list})
		end(nil)
	}
	for _, sp := range spans.Ended() {
		attrs := sp.Attributes()
		for _, l := range sp.Links() {
			attrs = append(attrs, l.Attributes...)
		}
		for _, a := range attrs {
			if a.Value.Type() == attribute.STRING && !utf8.ValidString(a.Value.AsString()) {
				t.Errorf("%s is %q", a.Key, a.Value.AsString())
			}
		}
	}
	if n := len(spans.Ended()); n != 2 {
		t.Errorf("%d spans", n)
	}
}

// logged is a Sink that logs its calls.
type logged struct {
	telemetry.Discard
	name string
	log  *[]string
}

func (l logged) Measure(m telemetry.Measurement) {
	*l.log = append(*l.log, l.name+" "+string(m.Metric))
}

func (l logged) Start(ctx context.Context, a telemetry.Attempt) (context.Context, func(error)) {
	*l.log = append(*l.log, l.name+" starts "+a.Handler)
	return ctx, func(error) { *l.log = append(*l.log, l.name+" ends") }
}

func (l logged) Inject(context.Context) []event.Header { return []event.Header{{Key: l.name}} }

func TestJoinPassesEverythingToAll(t *testing.T) {
	t.Parallel()
	var log []string
	s := telemetry.Join(logged{name: "a", log: &log}, nil, telemetry.Discard{}, logged{name: "b", log: &log})
	s.Measure(telemetry.Measurement{Metric: telemetry.Lag})
	_, end := s.Start(t.Context(), telemetry.Attempt{Handler: "h"})
	end(nil)
	for _, h := range s.Inject(t.Context()) {
		log = append(log, h.Key)
	}

	want := []string{"a lag", "b lag", "a starts h", "b starts h", "b ends", "a ends", "a", "b"}
	if diff := cmp.Diff(want, log); diff != "" {
		t.Error(diff)
	}
}
