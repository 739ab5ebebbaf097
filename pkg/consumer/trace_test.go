package consumer_test

import (
	"context"
	"errors"
	"sync"
	"testing"

	"go.opentelemetry.io/otel/baggage"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/trace"
	"go.opentelemetry.io/otel/trace/embedded"
	"go.opentelemetry.io/otel/trace/noop"

	"github.com/outrelay/outrelay/pkg/consumer"
	"github.com/outrelay/outrelay/pkg/event"
)

// spans is a tracer that records its spans.
type spans struct {
	embedded.Tracer
	mu   sync.Mutex
	list []*span
}

type span struct {
	noop.Span
	name  string
	cfg   trace.SpanConfig
	code  codes.Code
	text  string
	ended bool
	sc    trace.SpanContext
}

func (s *spans) Start(ctx context.Context, name string, opts ...trace.SpanStartOption) (context.Context, trace.Span) {
	s.mu.Lock()
	defer s.mu.Unlock()

	sp := &span{name: name, cfg: trace.NewSpanStartConfig(opts...)}
	sp.sc = trace.NewSpanContext(trace.SpanContextConfig{
		TraceID: trace.TraceID{15: byte(len(s.list) + 1)}, SpanID: trace.SpanID{7: 1},
	})
	s.list = append(s.list, sp)
	return trace.ContextWithSpan(ctx, sp), sp
}

func (s *span) SetStatus(c codes.Code, text string) { s.code, s.text = c, text }
func (s *span) End(...trace.SpanEndOption)          { s.ended = true }
func (s *span) SpanContext() trace.SpanContext      { return s.sc }

// startTrace returns a message with the headers traceparent and baggage, unless they are empty.
func startTrace(id, parent, bag string) *consumer.Message {
	m := &consumer.Message{ID: id, Topic: "orders", Group: "g", Attempt: 1}
	if parent != "" {
		m.Headers = append(m.Headers, event.Header{Key: "traceparent", Value: []byte(parent)})
	}
	if bag != "" {
		m.Headers = append(m.Headers, event.Header{Key: "baggage", Value: []byte(bag)})
	}
	return m
}

const parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"

func TestASpanIsLinkedToItsProducers(t *testing.T) {
	t.Parallel()
	var s spans
	start := consumer.Spans(&s, nil)
	ctx, end := start(t.Context(), "billing", []*consumer.Message{
		startTrace("1", parent, "tenant=x"), startTrace("2", "", ""), startTrace("3", "00-1af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", ""),
	})
	end(nil)

	sp := s.list[0]
	if sp.name != "process billing" || !sp.ended || sp.code != codes.Unset || !sp.cfg.NewRoot() || sp.cfg.SpanKind() != trace.SpanKindConsumer {
		t.Errorf("span: got %+v, want an ended root span of a consumer without an error", sp)
	}

	links := sp.cfg.Links()
	if len(links) != 2 || links[0].SpanContext.TraceID().String() != "0af7651916cd43dd8448eb211c80319c" {
		t.Errorf("links: got %+v, want two, the first to the first producer", links)
	}

	if trace.SpanFromContext(ctx) != trace.Span(sp) {
		t.Error("the handler's context has another span")
	}
	if baggage.FromContext(ctx).Len() != 0 {
		t.Errorf("baggage of several messages: got %v, want none", baggage.FromContext(ctx))
	}
}

func TestTheOutcomeOfASpanQuotesNothing(t *testing.T) {
	t.Parallel()
	var s spans
	secret := errors.New("card 4111")
	h := consumer.Traced(&s, nil)(func(ctx context.Context, _ *consumer.Message) error {
		if got := baggage.FromContext(ctx).Member("tenant").Value(); got != "x" {
			t.Errorf("baggage: got %q, want x", got)
		}
		return secret
	})

	if err := h(t.Context(), startTrace("1", parent, "tenant=x")); !errors.Is(err, secret) {
		t.Fatal(err)
	}

	if sp := s.list[0]; sp.code != codes.Error || sp.text != consumer.ClassHandler || !sp.ended {
		t.Errorf("span: got %+v, want an ended span with the status %s", sp, consumer.ClassHandler)
	}
}
