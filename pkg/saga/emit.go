package saga

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/outrelay/outrelay/pkg/event"
	"github.com/outrelay/outrelay/pkg/outbox"
)

// outgoing collects the events of a step. They are appended when the step succeeds.
type outgoing struct {
	id       string // of the saga, or "" if it does not exist
	events   []event.Event
	timeouts []delayedEvent
	cancel   []event.ID // timeouts to cancel
	now      time.Time  // the server's time when the state was stored
	ended    bool
}

// delayedEvent is an event that is due some time after the step.
type delayedEvent struct {
	event event.Event
	after time.Duration
}

type stepKey struct{}

// stepContext returns a context with which Emit adds events to o.
func (o *outgoing) stepContext(ctx context.Context) context.Context {
	return context.WithValue(ctx, stepKey{}, o)
}

// endStep makes later calls of Emit fail.
func (o *outgoing) endStep() { o.ended = true }

// Emit does the same as Instance.Emit, for code that has only the context of the step. It also
// works in a NotFound callback, where the events get no header because there is no saga. It returns
// ErrNoStep if ctx does not belong to a step, or if the step is over.
func Emit(ctx context.Context, events ...event.Event) error {
	o, _ := ctx.Value(stepKey{}).(*outgoing)
	if o == nil || o.ended {
		return ErrNoStep
	}
	o.addEvents(events)
	return nil
}

func (o *outgoing) addEvents(events []event.Event) {
	for _, ev := range events {
		o.events = append(o.events, o.withSagaID(ev))
	}
}

// withSagaID returns ev with the header saga-id, unless there is no saga or ev has the header.
func (o *outgoing) withSagaID(ev event.Event) event.Event {
	if _, ok := ev.Header(HeaderID); ok || o.id == "" {
		return ev
	}
	return ev.With(event.WithHeader(HeaderID, []byte(o.id)))
}

// appendToOutbox appends all events with one insert command and cancels timeouts.
func (o *outgoing) appendToOutbox(ctx context.Context, box Outbox) error {
	events := slices.Clone(o.events)

	// Timeouts are measured from the time at which the server stored the state.
	for _, t := range o.timeouts {
		events = append(events, t.event.With(event.WithDueAt(o.now.Add(t.after))))
	}

	// Steps without events need no outbox.
	if len(events) == 0 && len(o.cancel) == 0 {
		return nil
	}
	if box == nil {
		return ErrNoOutbox
	}

	for _, id := range o.cancel {
		// A timeout that is being sent already is ignored when it arrives.
		if err := box.Cancel(ctx, id); err != nil && !errors.Is(err, outbox.ErrNotScheduled) {
			return fmt.Errorf("canceling a timeout: %w", err)
		}
	}

	return box.Append(ctx, events...)
}
