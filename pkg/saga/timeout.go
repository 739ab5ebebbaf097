package saga

import (
	"encoding/json"
	"fmt"
	"slices"
	"time"

	"github.com/outrelay/outrelay/pkg/consumer"
	"github.com/outrelay/outrelay/pkg/event"
)

// headerTimeout has the id of a timeout, so that one that was taken back or set anew is known when it comes nevertheless.
const headerTimeout = "saga-timeout"

// timer is a timeout that has not come yet.
type timer struct {
	Name  string   `bson:"name"`
	Event event.ID `bson:"event"`
}

// Timeout asks for the timeout of that name some time after this step, by the server's clock: a scheduled event of the
// saga's aggregate type (see WithAggregate), whose topic the saga's consumer must read. One of the same name that has not
// come yet is taken back. payload is that of event.New; nil is the JSON object {}. It is an error if the saga has no
// callback for it.
func (in *Instance[S, I]) Timeout(name string, after time.Duration, payload any, opts ...event.Option) error {
	s := in.h.saga
	typ := s.TimeoutType(name)
	if in.h.routes[typ].timeout == "" {
		return fmt.Errorf("timeout %q of saga %s: %w: define it by Timeout", name, s.name, ErrUnknownMessage)
	}
	if after < 0 {
		return fmt.Errorf("timeout %q of saga %s: it is due %s ago", name, s.name, -after)
	}
	if payload == nil {
		payload = json.RawMessage("{}")
		opts = append([]event.Option{event.WithContentType("application/json")}, opts...)
	}
	in.CancelTimeout(name)
	ev := event.New(s.aggregate, in.out.id, typ, payload, opts...)
	ev = in.out.mark(ev).With(event.WithHeader(headerTimeout, []byte(ev.ID().String())))
	in.doc.Timeouts = append(in.doc.Timeouts, timer{Name: name, Event: ev.ID()})
	in.out.timeouts = append(in.out.timeouts, scheduled{event: ev, after: milliseconds(after)})
	return nil
}

// CancelTimeout takes the timeout of that name back and reports whether there was one. It will not run any more, also if it
// is on its way already.
func (in *Instance[S, I]) CancelTimeout(name string) bool {
	i := slices.IndexFunc(in.doc.Timeouts, func(t timer) bool { return t.Name == name })
	if i < 0 {
		return false
	}
	id := in.doc.Timeouts[i].Event
	in.doc.Timeouts = slices.Delete(in.doc.Timeouts, i, i+1)
	n := len(in.out.timeouts)
	in.out.timeouts = slices.DeleteFunc(in.out.timeouts, func(s scheduled) bool { return s.event.ID() == id })
	if len(in.out.timeouts) == n {
		in.out.cancel = append(in.out.cancel, id)
	}
	return true
}

func (in *Instance[S, I]) cancelTimeouts() {
	for len(in.doc.Timeouts) > 0 {
		in.CancelTimeout(in.doc.Timeouts[0].Name)
	}
}

// expire takes the timeout of m off the list; false if nobody waits for it any more.
func (in *Instance[S, I]) expire(m *consumer.Message) bool {
	id, _ := m.Header(headerTimeout)
	n := len(in.doc.Timeouts)
	in.doc.Timeouts = slices.DeleteFunc(in.doc.Timeouts, func(t timer) bool { return t.Event.String() == string(id) })
	return len(in.doc.Timeouts) < n
}
