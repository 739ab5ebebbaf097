package consumer

import (
	"context"
	"errors"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/trace"
)

// headerCarrier lets a propagator read the headers of a message. Where a name repeats, the first counts.
type headerCarrier []Header

func (c headerCarrier) Get(key string) string {
	for _, h := range c {
		if h.Key == key {
			return string(h.Value)
		}
	}
	return ""
}

// Set is a propagator's; nothing is injected into a message that came.
func (c headerCarrier) Set(string, string) {}

func (c headerCarrier) Keys() []string {
	keys := make([]string, len(c))
	for i, h := range c {
		keys[i] = h.Key
	}
	return keys
}

// DefaultPropagator is W3C trace context and baggage, as the outbox writes them.
func DefaultPropagator() propagation.TextMapPropagator {
	return propagation.NewCompositeTextMapPropagator(propagation.TraceContext{}, propagation.Baggage{})
}

// Extract is ctx with the trace context and the baggage of the message's headers.
func Extract(ctx context.Context, p propagation.TextMapPropagator, m *Message) context.Context {
	return p.Extract(ctx, headerCarrier(m.Headers))
}

// Spans makes a span of each attempt: a new trace that is linked to the span of the producer of each message, since many
// messages may be handled in one attempt, and one message by many attempts. Events that the handler appends carry the
// span, and, where one message is handled alone, its baggage. nil for p is DefaultPropagator.
func Spans(tracer trace.Tracer, p propagation.TextMapPropagator) Tracer {
	if p == nil {
		p = DefaultPropagator()
	}
	return func(ctx context.Context, handler string, ms []*Message) (context.Context, func(error)) {
		links := make([]trace.Link, 0, len(ms))
		for _, m := range ms {
			if from := trace.SpanContextFromContext(Extract(context.Background(), p, m)); from.IsValid() {
				links = append(links, trace.Link{SpanContext: from, Attributes: []attribute.KeyValue{attribute.String("messaging.message.id", m.ID)}})
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
			attrs = append(attrs, attribute.String("messaging.destination.name", ms[0].Topic), attribute.String("messaging.consumer.group.name", ms[0].Group))
		}
		if len(ms) == 1 {
			attrs = append(attrs, attribute.String("messaging.message.id", ms[0].ID), attribute.String("outrelay.type", ms[0].Type),
				attribute.Int("outrelay.attempt", ms[0].Attempt))
		}
		ctx, span := tracer.Start(ctx, "process "+handler, trace.WithNewRoot(), trace.WithSpanKind(trace.SpanKindConsumer),
			trace.WithLinks(links...), trace.WithAttributes(attrs...))
		return ctx, func(err error) {
			if err != nil && !errors.Is(err, ErrDrop) {
				// The class alone: an error may quote what a trace must not hold.
				span.SetStatus(codes.Error, Class(err))
				span.SetAttributes(attribute.String("error.type", Class(err)))
			}
			span.End()
		}
	}
}

// Traced is Spans as a middleware, for handlers that are called without a consumer.
func Traced(tracer trace.Tracer, p propagation.TextMapPropagator) Middleware {
	start := Spans(tracer, p)
	return func(next Handler) Handler {
		return HandlerFunc(func(ctx context.Context, m *Message) (err error) {
			ctx, end := start(ctx, HandlerName(ctx), []*Message{m})
			err = errPanicked
			defer func() { end(err) }()
			err = next.Handle(ctx, m)
			return err
		})
	}
}

// errPanicked is the outcome of an attempt that did not return.
var errPanicked = &PanicError{Value: "the handler did not return"}
