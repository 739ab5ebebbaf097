package appending

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

var w3c = propagation.NewCompositeTextMapPropagator(propagation.TraceContext{}, propagation.Baggage{})

// traceHeaders returns the headers that carry the trace context and the baggage of ctx, in the formats of the
// W3C. There are none if ctx is not traced.
func traceHeaders(ctx context.Context) []event.Header {
	var c carrier
	w3c.Inject(ctx, &c)
	return c
}

// addHeaders returns ev with the captured headers that ev does not have yet. If ev has a traceparent, it leaves
// out the captured tracestate, because it belongs to another trace.
func addHeaders(ev event.Event, captured []event.Header) event.Event {
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
