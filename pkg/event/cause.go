package event

import (
	"cmp"
	"context"
	"slices"

	"github.com/outrelay/outrelay/internal/contract/record"
)

// The headers of the fields of a Cause.
const (
	HeaderCorrelationID = record.HeaderCorrelationID
	HeaderCausationID   = record.HeaderCausationID
)

// Cause connects an event with the events before it. An empty field means that the event has no such header.
//
// An event that a handler of package consumer appends gets the cause of its message: the correlation id of the message, or the id
// of the message if it has none, and the id of the message as the causation id. So all events that follow from one event have its
// id as their correlation id, through any number of services, and are one conversation: see outrelay lookup --conversation.
type Cause struct {
	// CorrelationID identifies the conversation. The first event of a conversation usually has none: its own id is the correlation
	// id of the events that follow.
	CorrelationID string

	// CausationID is the id of the message whose handler appended the event.
	CausationID string
}

type causeKey struct{}

// ContextWithCause returns a context whose cause outbox.Box.Append adds to the events that have none of their own. Handlers of
// package consumer have such a context. Use it at the border of the system, for example with the id of an HTTP request, and in a
// handler of batches, whose messages have different causes: see consumer.Message.Cause.
func ContextWithCause(ctx context.Context, cause Cause) context.Context {
	return context.WithValue(ctx, causeKey{}, cause)
}

// CauseFromContext returns the cause of ContextWithCause, or the zero value.
func CauseFromContext(ctx context.Context) Cause {
	cause, _ := ctx.Value(causeKey{}).(Cause)
	return cause
}

// WithCause sets the cause of the event, which then has precedence over the cause of the context. An empty field leaves the part as
// it is.
func WithCause(cause Cause) Option {
	return option(func(event *Event) {
		event.setHeader(HeaderCorrelationID, cause.CorrelationID)
		event.setHeader(HeaderCausationID, cause.CausationID)
	})
}

// Cause returns the cause that the event has, from WithCause or from its headers.
func (e Event) Cause() Cause {
	correlation, _ := e.Header(HeaderCorrelationID)
	causation, _ := e.Header(HeaderCausationID)
	return Cause{CorrelationID: string(correlation), CausationID: string(causation)}
}

// Or returns the cause with the empty fields taken from other.
func (c Cause) Or(other Cause) Cause {
	return Cause{
		CorrelationID: cmp.Or(c.CorrelationID, other.CorrelationID),
		CausationID:   cmp.Or(c.CausationID, other.CausationID),
	}
}

// setHeader replaces all headers of that name by one, unless the value is empty.
func (e *Event) setHeader(name, value string) {
	if value == "" {
		return
	}
	e.headers = slices.DeleteFunc(slices.Clone(e.headers), func(header Header) bool { return header.Key == name })
	e.headers = append(e.headers, Header{name, []byte(value)})
}
