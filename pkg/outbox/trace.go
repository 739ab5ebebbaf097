package outbox

import (
	"context"

	"github.com/outrelay/outrelay/pkg/event"
)

// carrier collects what a propagator injects, in its order.
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

// traceHeaders are the headers that carry the trace context of ctx; none where nothing is traced.
func (b *Box) traceHeaders(ctx context.Context) []event.Header {
	if b.propagator == nil {
		return nil
	}
	var c carrier
	b.propagator.Inject(ctx, &c)
	return c
}

// withTrace adds the captured headers unless the event brings its own: a traceparent of its own belongs to another
// tracestate than the captured one.
func withTrace(ev event.Event, trace []event.Header) event.Event {
	own := ev.HasHeader("traceparent")
	var opts []event.Option
	for _, h := range trace {
		if ev.HasHeader(h.Key) || own && h.Key == "tracestate" {
			continue
		}
		opts = append(opts, event.WithHeader(h.Key, h.Value))
	}
	if opts == nil {
		return ev
	}
	return ev.With(opts...)
}
