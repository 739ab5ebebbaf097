package appending

import "github.com/outrelay/outrelay/pkg/event"

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

// addCause returns ev with the parts of cause that ev does not have yet.
func addCause(ev event.Event, cause event.Cause) event.Event {
	if own := ev.Cause(); own.Or(cause) != own {
		return ev.With(event.WithCause(own.Or(cause)))
	}
	return ev
}
