package saga

import (
	"fmt"
	"slices"
	"time"

	"github.com/outrelay/outrelay/pkg/consumer"
	"github.com/outrelay/outrelay/pkg/event"
)

// headerTimeout is the name of the header with the id of a timeout. It identifies a timeout that
// was canceled or requested again before it arrived.
const headerTimeout = "saga-timeout"

// pendingTimeout is a timeout that has not arrived yet.
type pendingTimeout struct {
	Name  string   `bson:"name"`
	Event event.ID `bson:"event"`
}

// Timeout requests the timeout name. It arrives after the time after, measured from this step by
// the server's clock and rounded up to milliseconds. If a timeout of this name is pending, it is
// canceled.
//
// The timeout is a scheduled event of the aggregate type of the saga (see WithAggregate). The
// consumer of the saga must read its topic. The zero payload means the JSON object {}.
//
// It is an error if after is negative, or if Saga.Timeout has not defined a step for name.
func (in *Instance[S, I]) Timeout(name string, after time.Duration, payload event.Payload, opts ...event.Option) error {
	s := in.h.saga
	typ := s.TimeoutType(name)
	if in.h.routes[typ].timeout == "" {
		return fmt.Errorf("timeout %q of saga %s: %w: define its step with Saga.Timeout", name, s.name, ErrUnknownMessage)
	}
	if after < 0 {
		return fmt.Errorf("timeout %q of saga %s: invalid delay of %s: it must not be negative", name, s.name, after)
	}

	// A saga has at most one timeout of a name.
	in.CancelTimeout(name)

	ev := event.New(event.Aggregate{Type: s.aggregate, ID: in.out.id}, typ, payload, opts...)
	if body, err := ev.Payload(); err == nil && body == nil {
		ev = ev.With(event.WithPayload(event.Bytes("application/json", []byte("{}"))))
	}
	ev = in.out.withSagaID(ev).With(event.WithHeader(headerTimeout, []byte(ev.ID().String())))

	in.doc.Timeouts = append(in.doc.Timeouts, pendingTimeout{Name: name, Event: ev.ID()})
	in.out.timeouts = append(in.out.timeouts, delayedEvent{event: ev, after: ceilMilliseconds(after)})
	return nil
}

// CancelTimeout cancels the timeout name and reports whether it was pending. Its step will not run,
// even if the event is being sent already.
func (in *Instance[S, I]) CancelTimeout(name string) bool {
	i := slices.IndexFunc(in.doc.Timeouts, func(t pendingTimeout) bool { return t.Name == name })
	if i < 0 {
		return false
	}

	id := in.doc.Timeouts[i].Event
	in.doc.Timeouts = slices.Delete(in.doc.Timeouts, i, i+1)

	// A timeout of this step was not appended yet. Earlier ones must be canceled in the outbox.
	n := len(in.out.timeouts)
	in.out.timeouts = slices.DeleteFunc(in.out.timeouts, func(s delayedEvent) bool { return s.event.ID() == id })
	if len(in.out.timeouts) == n {
		in.out.cancel = append(in.out.cancel, id)
	}

	return true
}

// cancelTimeouts cancels all pending timeouts.
func (in *Instance[S, I]) cancelTimeouts() {
	for len(in.doc.Timeouts) > 0 {
		in.CancelTimeout(in.doc.Timeouts[0].Name)
	}
}

// expireTimeout removes the timeout of m from the pending ones. It returns false if it was not
// pending.
func (in *Instance[S, I]) expireTimeout(m *consumer.Message) bool {
	// The name is not enough: the timeout may have been requested again.
	id, _ := m.Header(headerTimeout)
	n := len(in.doc.Timeouts)
	in.doc.Timeouts = slices.DeleteFunc(in.doc.Timeouts, func(t pendingTimeout) bool { return t.Event.String() == string(id) })
	return len(in.doc.Timeouts) < n
}
