// Package tracecontext adds the trace context of a caller to the headers of events.
package tracecontext

import (
	"context"

	"go.opentelemetry.io/otel/propagation"

	"github.com/outrelay/outrelay/pkg/event"
)

// carrier collects the headers that a propagator injects, in order.
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

// Headers returns the headers that carry the trace context of ctx. There are none if ctx is not traced, or p
// is nil.
func Headers(ctx context.Context, p propagation.TextMapPropagator) []event.Header {
	if p == nil {
		return nil
	}
	var c carrier
	p.Inject(ctx, &c)
	return c
}

// Add returns ev with the captured headers that ev does not have yet. If ev has a traceparent, Add leaves out
// the captured tracestate, because it belongs to another trace.
func Add(ev event.Event, captured []event.Header) event.Event {
	_, own := ev.Header("traceparent")
	var opts []event.Option
	for _, h := range captured {
		if _, ok := ev.Header(h.Key); ok || own && h.Key == "tracestate" {
			continue
		}
		opts = append(opts, event.WithHeader(h.Key, h.Value))
	}

	if opts == nil {
		return ev
	}
	return ev.With(opts...)
}
