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
	sink := &otelSink{tracer: otel.Tracer(scope), instruments: map[Metric][]instrument{}}
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
		sink.instruments[d.metric] = append(sink.instruments[d.metric], i)
	}
	return sink
}

// Measure records one measurement.
func (s *otelSink) Measure(measurement Measurement) {
	for i := range s.instruments[measurement.Metric] {
		s.instruments[measurement.Metric][i].record(context.Background(), &measurement)
	}
}

// record adds measurement to the instrument. It builds the attributes, which allocates, only if the instrument has a reader.
func (i *instrument) record(ctx context.Context, measurement *Measurement) {
	switch i.kind {
	case counter, occasions:
		n := measurement.N
		if i.kind == occasions {
			n = 1
		}
		if i.counter.Enabled(ctx) {
			i.counter.Add(ctx, n, i.attributes(measurement))
		}

	case gauge, age:
		value := float64(measurement.N)
		if i.kind == age {
			value = measurement.Took.Seconds()
		}
		if i.gauge.Enabled(ctx) {
			i.gauge.Record(ctx, value, i.attributes(measurement))
		}

	case histogram:
		if i.histogram.Enabled(ctx) {
			i.histogram.Record(ctx, measurement.Took.Seconds(), i.attributes(measurement))
		}
	}
}

// attributes returns the labels of measurement that the metric has.
func (i *instrument) attributes(measurement *Measurement) metric.MeasurementOption {
	list := make([]attribute.KeyValue, len(i.labels))
	for n, name := range i.labels {
		list[n] = text(name, measurement.label(name))
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
	if propagator := otel.GetTextMapPropagator(); len(propagator.Fields()) > 0 {
		return propagator
	}
	return w3c
}

// Start begins the span of an attempt.
func (s *otelSink) Start(ctx context.Context, attempt Attempt) (context.Context, func(error)) {
	textMapPropagator := propagator()
	links := make([]trace.Link, 0, len(attempt.Messages))
	for i := range attempt.Messages {
		message := &attempt.Messages[i]
		from := textMapPropagator.Extract(context.Background(), (*carrier)(&message.Headers))
		// The producers of a batch are links, because a span has one parent.
		if producer := trace.SpanContextFromContext(from); producer.IsValid() {
			id := text("messaging.message.id", message.ID)
			links = append(links, trace.Link{SpanContext: producer, Attributes: []attribute.KeyValue{id}})
		}
	}

	attrs := []attribute.KeyValue{
		attribute.String("messaging.system", "kafka"),
		attribute.String("messaging.operation.type", "process"),
		text("messaging.destination.name", attempt.Topic),
		attribute.String("messaging.consumer.group.name", attempt.Group),
		attribute.Int("messaging.batch.message_count", len(attempt.Messages)),
		attribute.String("outrelay.handler", attempt.Handler),
	}
	// With one message, the context also gets its baggage.
	if len(attempt.Messages) == 1 {
		message := &attempt.Messages[0]
		ctx = textMapPropagator.Extract(ctx, (*carrier)(&message.Headers))
		attrs = append(attrs,
			text("messaging.message.id", message.ID),
			text("outrelay.type", message.Name),
			attribute.Int("outrelay.attempt", message.Number))
	}

	// The trace of the producer may have ended long ago, so the attempt begins its own.
	ctx, span := s.tracer.Start(ctx, "process "+attempt.Handler, trace.WithNewRoot(), trace.WithSpanKind(trace.SpanKindConsumer),
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
	var carrier carrier
	propagator().Inject(ctx, &carrier)
	return carrier
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
