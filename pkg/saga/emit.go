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

// outgoing is what leaves with a step when it succeeds.
type outgoing struct {
	id       string // of the existing saga; "" where there is none
	events   []event.Event
	timeouts []scheduled
	cancel   []event.ID
	now      time.Time // the server's, when the state was saved
	over     bool
}

// scheduled is an event that is due some time after the step.
type scheduled struct {
	event event.Event
	after time.Duration
}

type stepKey struct{}

func (o *outgoing) context(ctx context.Context) context.Context {
	return context.WithValue(ctx, stepKey{}, o)
}

func (o *outgoing) end() { o.over = true }

// Emit is Instance.Emit for code that has only the step's context, that of a NotFound callback too: there is no saga
// then, so the events get no header. It returns ErrNoStep for another context, or when the step is over.
func Emit(ctx context.Context, events ...event.Event) error {
	o, _ := ctx.Value(stepKey{}).(*outgoing)
	if o == nil || o.over {
		return ErrNoStep
	}
	o.add(events)
	return nil
}

func (o *outgoing) add(events []event.Event) {
	for _, ev := range events {
		o.events = append(o.events, o.mark(ev))
	}
}

func (o *outgoing) mark(ev event.Event) event.Event {
	if o.id == "" || ev.HasHeader(HeaderID) {
		return ev
	}
	return ev.With(event.WithHeader(HeaderID, []byte(o.id)))
}

// flush appends all events in one statement and takes timeouts back.
func (o *outgoing) flush(ctx context.Context, box Outbox) error {
	events := slices.Clone(o.events)
	for _, t := range o.timeouts {
		events = append(events, t.event.With(event.WithDueAt(o.now.Add(t.after))))
	}
	if len(events) == 0 && len(o.cancel) == 0 {
		return nil
	}
	if box == nil {
		return ErrNoOutbox
	}
	for _, id := range o.cancel {
		// One that is on its way already will find that nobody waits for it.
		if err := box.Cancel(ctx, id); err != nil && !errors.Is(err, outbox.ErrNotScheduled) {
			return fmt.Errorf("taking a timeout back: %w", err)
		}
	}
	return box.AppendMany(ctx, events)
}
