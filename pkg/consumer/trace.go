package consumer

import (
	"context"

	"github.com/outrelay/outrelay/pkg/event"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/trace"
)

// headerCarrier lets a propagator read the headers of a message. It uses the first header of each name.
type headerCarrier []event.Header

func (c headerCarrier) Get(key string) string {
	for _, h := range c {
		if h.Key == key {
			return string(h.Value)
		}
	}
	return ""
}

// Set does nothing: nothing is injected into a received message.
func (c headerCarrier) Set(string, string) {}

func (c headerCarrier) Keys() []string {
	keys := make([]string, len(c))
	for i, h := range c {
		keys[i] = h.Key
	}
	return keys
}

// DefaultPropagator returns the propagator of W3C trace context and baggage, in the format of the outbox.
func DefaultPropagator() propagation.TextMapPropagator {
	return propagation.NewCompositeTextMapPropagator(propagation.TraceContext{}, propagation.Baggage{})
}

// Extract returns ctx with the trace context and the baggage of the message's headers.
func Extract(ctx context.Context, p propagation.TextMapPropagator, m *Message) context.Context {
	return p.Extract(ctx, headerCarrier(m.Headers))
}

// Spans returns a Tracer that starts a span for each attempt. Each span begins a new trace and
// links to the producer's span of each message, because an attempt may handle many messages, and a
// message may take many attempts. Events that the handler appends carry the span. If the attempt
// handles a single message, they carry its baggage too. If p is nil, Spans uses DefaultPropagator.
func Spans(tracer trace.Tracer, p propagation.TextMapPropagator) Tracer {
	if p == nil {
		p = DefaultPropagator()
	}
	return func(ctx context.Context, handler string, ms []*Message) (context.Context, func(error)) {
		links := make([]trace.Link, 0, len(ms))
		for _, m := range ms {
			from := trace.SpanContextFromContext(Extract(context.Background(), p, m))
			if from.IsValid() {
				id := attribute.String("messaging.message.id", m.ID)
				links = append(links, trace.Link{SpanContext: from, Attributes: []attribute.KeyValue{id}})
			}
		}
		if len(ms) == 1 {
			ctx = Extract(ctx, p, ms[0])
		}

		attrs := []attribute.KeyValue{
			attribute.String("messaging.system", "kafka"), attribute.String("messaging.operation.type", "process"),
			attribute.String("outrelay.handler", handler), attribute.Int("messaging.batch.message_count", len(ms)),
		}
		if len(ms) > 0 {
			attrs = append(attrs,
				attribute.String("messaging.destination.name", ms[0].Topic),
				attribute.String("messaging.consumer.group.name", ms[0].Group))
		}
		if len(ms) == 1 {
			attrs = append(attrs,
				attribute.String("messaging.message.id", ms[0].ID),
				attribute.String("outrelay.type", ms[0].Name),
				attribute.Int("outrelay.attempt", ms[0].Attempt))
		}

		ctx, span := tracer.Start(ctx, "process "+handler, trace.WithNewRoot(), trace.WithSpanKind(trace.SpanKindConsumer),
			trace.WithLinks(links...), trace.WithAttributes(attrs...))
		return ctx, func(err error) {
			if err != nil && !isDiscard(err) {
				// Only the class: the text of an error may quote content that must not be in a trace.
				span.SetStatus(codes.Error, Class(err))
				span.SetAttributes(attribute.String("error.type", Class(err)))
			}
			span.End()
		}
	}
}

// Traced returns Spans as a middleware, for handlers that are called without a consumer.
func Traced(tracer trace.Tracer, p propagation.TextMapPropagator) Middleware {
	start := Spans(tracer, p)
	return func(next HandlerFunc) HandlerFunc {
		return func(ctx context.Context, m *Message) (err error) {
			ctx, end := start(ctx, HandlerName(ctx), []*Message{m})

			err = errPanicked
			defer func() { end(err) }()
			err = next(ctx, m)
			return err
		}
	}
}

// errPanicked is the error of an attempt whose handler did not return.
var errPanicked = &panicError{Value: "the handler did not return"}
