package saga

import (
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

// TimeoutIn requests the timeout name. It arrives after the time after, measured from this step by the server's clock and
// rounded up to milliseconds. If a timeout of this name is pending, it is canceled.
//
// The timeout is a scheduled event of the aggregate type of the saga (see WithAggregate). The consumer of the saga must read
// its topic. If after is negative, or if Saga.Timeout has not defined a step for name, the step fails.
func (in *Instance[S]) TimeoutIn(name string, after time.Duration) {
	saga := in.h.saga
	typ := saga.timeoutType(name)
	if saga.routes[typ] == nil || saga.routes[typ].timeout == "" {
		in.addProblem("timeout %q has no step: define it with Saga.Timeout", name)
	}
	if after < 0 {
		in.addProblem("timeout %q: invalid delay of %s: it must not be negative", name, after)
	}

	// A saga has at most one timeout of a name.
	in.CancelTimeout(name)

	ev := event.New(event.Aggregate{Type: saga.settings.aggregate, ID: in.ID()}, typ, event.Bytes("application/json", []byte("{}")))
	ev = in.connectEvent(ev).With(event.WithHeader(headerTimeout, []byte(ev.ID().String())))

	// The precision of a due time is a millisecond.
	after = (after + time.Millisecond - 1).Truncate(time.Millisecond)
	in.doc.Timeouts = append(in.doc.Timeouts, pendingTimeout{Name: name, Event: ev.ID()})
	in.out.timeouts = append(in.out.timeouts, delayedEvent{event: ev, after: after})
}

// CancelTimeout cancels the timeout name and reports whether it was pending. Its step will not run,
// even if the event is being sent already.
func (in *Instance[S]) CancelTimeout(name string) bool {
	i := slices.IndexFunc(in.doc.Timeouts, func(timeout pendingTimeout) bool { return timeout.Name == name })
	if i < 0 {
		return false
	}

	id := in.doc.Timeouts[i].Event
	in.doc.Timeouts = slices.Delete(in.doc.Timeouts, i, i+1)

	// A timeout of this step was not appended yet. Earlier ones must be canceled in the outbox.
	n := len(in.out.timeouts)
	in.out.timeouts = slices.DeleteFunc(in.out.timeouts, func(event delayedEvent) bool { return event.event.ID() == id })
	if len(in.out.timeouts) == n {
		in.out.cancel = append(in.out.cancel, id)
	}

	return true
}

// cancelTimeouts cancels all pending timeouts.
func (in *Instance[S]) cancelTimeouts() {
	for len(in.doc.Timeouts) > 0 {
		in.CancelTimeout(in.doc.Timeouts[0].Name)
	}
}

// expireTimeout removes the timeout of message from the pending ones. It returns false if it was not
// pending.
func (in *Instance[S]) expireTimeout(message *consumer.Message) bool {
	// The name is not enough: the timeout may have been requested again.
	id, _ := message.Header(headerTimeout)
	n := len(in.doc.Timeouts)
	in.doc.Timeouts = slices.DeleteFunc(in.doc.Timeouts, func(timeout pendingTimeout) bool { return timeout.Event.String() == string(id) })
	return len(in.doc.Timeouts) < n
}
