package telemetry

import (
	"context"
	"strings"

	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/trace"

	"github.com/outrelay/outrelay/pkg/event"
)

// scope names this library to OpenTelemetry.
const scope = "github.com/outrelay/outrelay"

type otelSink struct {
	Discard
	tracer      trace.Tracer
	instruments map[Metric][]instrument
}

// instrument is an instrument of OpenTelemetry. Only the field of its kind is set.
type instrument struct {
	definition
	counter   metric.Int64Counter
	gauge     metric.Float64Gauge
	histogram metric.Float64Histogram
}

// OTel returns a Sink that uses the global tracer and meter providers and the global propagator of OpenTelemetry. They may be
// set later. Without a global propagator it uses the formats of the W3C: trace context and baggage.
//
// It is the default of outbox.New and consumer.New. Without providers it passes the trace context of the caller on, and
// does nothing else. The metrics have the names of Prometheus without the suffix _total.
//
// Each attempt at messages gets a span of its own trace, with links to the spans of their producers: an attempt may handle
// many messages, and a message may take many attempts. Events that the handler appends carry the span. If the attempt handles
// a single message, they carry its baggage too.
func OTel() Sink {
	s := &otelSink{tracer: otel.Tracer(scope), instruments: map[Metric][]instrument{}}
	meter := otel.Meter(scope)

	for _, d := range definitions {
		i := instrument{definition: d}
		var err error
		switch d.kind {
		case counter, occasions:
			i.counter, err = meter.Int64Counter(d.name, metric.WithDescription(d.help))
		case gauge:
			i.gauge, err = meter.Float64Gauge(d.name, metric.WithDescription(d.help))
		case age:
			i.gauge, err = meter.Float64Gauge(d.name, metric.WithDescription(d.help), metric.WithUnit("s"))
		case histogram:
			i.histogram, err = meter.Float64Histogram(d.name, metric.WithDescription(d.help), metric.WithUnit("s"),
				metric.WithExplicitBucketBoundaries(buckets...))
		}
		// A metric that the provider rejects must not stop the service.
		if err != nil {
			otel.Handle(err)
			continue
		}
		s.instruments[d.metric] = append(s.instruments[d.metric], i)
	}
	return s
}

// Measure records one measurement.
func (s *otelSink) Measure(m Measurement) {
	for i := range s.instruments[m.Metric] {
		s.instruments[m.Metric][i].record(context.Background(), &m)
	}
}

// record adds m to the instrument. It builds the attributes, which allocates, only if the instrument has a reader.
func (i *instrument) record(ctx context.Context, m *Measurement) {
	switch i.kind {
	case counter, occasions:
		n := m.N
		if i.kind == occasions {
			n = 1
		}
		if i.counter.Enabled(ctx) {
			i.counter.Add(ctx, n, i.attributes(m))
		}

	case gauge, age:
		value := float64(m.N)
		if i.kind == age {
			value = m.Took.Seconds()
		}
		if i.gauge.Enabled(ctx) {
			i.gauge.Record(ctx, value, i.attributes(m))
		}

	case histogram:
		if i.histogram.Enabled(ctx) {
			i.histogram.Record(ctx, m.Took.Seconds(), i.attributes(m))
		}
	}
}

// attributes returns the labels of m that the metric has.
func (i *instrument) attributes(m *Measurement) metric.MeasurementOption {
	list := make([]attribute.KeyValue, len(i.labels))
	for n, name := range i.labels {
		list[n] = text(name, m.label(name))
	}
	return metric.WithAttributeSet(attribute.NewSet(list...))
}

// text returns an attribute whose value is valid UTF-8. Producers choose ids and names, and an exporter drops all spans of its
// batch because of a text that is not UTF-8.
func text(key, value string) attribute.KeyValue {
	return attribute.String(key, strings.ToValidUTF8(value, "\uFFFD"))
}

var w3c = propagation.NewCompositeTextMapPropagator(propagation.TraceContext{}, propagation.Baggage{})

// propagator returns the global propagator, or that of the W3C if the program has set none.
func propagator() propagation.TextMapPropagator {
	if p := otel.GetTextMapPropagator(); len(p.Fields()) > 0 {
		return p
	}
	return w3c
}

// Start begins the span of an attempt.
func (s *otelSink) Start(ctx context.Context, a Attempt) (context.Context, func(error)) {
	p := propagator()
	links := make([]trace.Link, 0, len(a.Messages))
	for i := range a.Messages {
		m := &a.Messages[i]
		from := p.Extract(context.Background(), (*carrier)(&m.Headers))
		// The producers of a batch are links, because a span has one parent.
		if producer := trace.SpanContextFromContext(from); producer.IsValid() {
			id := text("messaging.message.id", m.ID)
			links = append(links, trace.Link{SpanContext: producer, Attributes: []attribute.KeyValue{id}})
		}
	}

	attrs := []attribute.KeyValue{
		attribute.String("messaging.system", "kafka"),
		attribute.String("messaging.operation.type", "process"),
		text("messaging.destination.name", a.Topic),
		attribute.String("messaging.consumer.group.name", a.Group),
		attribute.Int("messaging.batch.message_count", len(a.Messages)),
		attribute.String("outrelay.handler", a.Handler),
	}
	// With one message, the context also gets its baggage.
	if len(a.Messages) == 1 {
		m := &a.Messages[0]
		ctx = p.Extract(ctx, (*carrier)(&m.Headers))
		attrs = append(attrs,
			text("messaging.message.id", m.ID),
			text("outrelay.type", m.Name),
			attribute.Int("outrelay.attempt", m.Number))
	}

	// The trace of the producer may have ended long ago, so the attempt begins its own.
	ctx, span := s.tracer.Start(ctx, "process "+a.Handler, trace.WithNewRoot(), trace.WithSpanKind(trace.SpanKindConsumer),
		trace.WithLinks(links...), trace.WithAttributes(attrs...))
	return ctx, func(err error) {
		if err != nil {
			// The text of the error is only the class.
			span.SetStatus(codes.Error, err.Error())
			span.SetAttributes(attribute.String("error.type", err.Error()))
		}
		span.End()
	}
}

// Inject returns the trace context and the baggage of ctx as headers. There are none if ctx is not traced.
func (s *otelSink) Inject(ctx context.Context) []event.Header {
	var c carrier
	propagator().Inject(ctx, &c)
	return c
}

// carrier lets a propagator read and write headers. It reads the first header of each name.
type carrier []event.Header

func (c *carrier) Get(key string) string {
	for _, h := range *c {
		if h.Key == key {
			return string(h.Value)
		}
	}
	return ""
}

func (c *carrier) Set(key, value string) {
	*c = append(*c, event.Header{Key: key, Value: []byte(value)})
}

func (c *carrier) Keys() []string {
	keys := make([]string, len(*c))
	for i, h := range *c {
		keys[i] = h.Key
	}
	return keys
}
