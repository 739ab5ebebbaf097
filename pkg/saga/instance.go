package saga

import (
	"context"
	"errors"
	"fmt"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/service/sagas"
	"github.com/outrelay/outrelay/pkg/consumer"
	"github.com/outrelay/outrelay/pkg/event"
	"github.com/outrelay/outrelay/pkg/outbox"
)

// Instance is one saga during a step. It belongs to the goroutine of the step and must not be used
// after the step.
type Instance[S any] struct {
	// State is the state of the saga. It is the zero value when the saga starts. The step changes
	// it in place.
	State S

	h         *handler[S]
	id        any
	message   *consumer.Message
	record    sagas.Record
	doc       document[S]
	out       outgoing
	completed bool
	problems  []error // of the running step; they fail it
}

// document is the stored form of an instance, without the fields of the Store.
type document[S any] struct {
	State S `bson:"state"`

	// Waiting is true if the document contains held messages only, because no step has run yet.
	Waiting bool `bson:"waiting,omitempty"`

	Timeouts      []pendingTimeout `bson:"timeouts,omitempty"`
	Compensations []bson.Raw       `bson:"compensations,omitempty"` // envelopes, oldest first
	Sequence      int64            `bson:"sequence,omitempty"`      // number of the last message handled in sequence
	Held          []heldMessage    `bson:"held,omitempty"`          // sorted by number
	Stuck         *stuckMessage    `bson:"stuck,omitempty"`         // the first held message, if its step failed
}

// outgoing collects the events of a step. They are appended when the step succeeds.
type outgoing struct {
	events   []event.Event
	timeouts []delayedEvent
	cancel   []event.ID // timeouts to cancel
}

// delayedEvent is an event that is due some time after the step.
type delayedEvent struct {
	event event.Event
	after time.Duration
}

// newInstance returns an instance with the state of the stored record. Each attempt of a step gets
// a new one.
func (h *handler[S]) newInstance(rec sagas.Record, found bool, id any) (*Instance[S], error) {
	in := &Instance[S]{h: h, id: id, record: rec}
	if !found {
		in.record = sagas.Record{ID: id}

		// No step has run yet.
		in.doc.Waiting = true
		return in, nil
	}
	if err := bson.Unmarshal(rec.Body, &in.doc); err != nil {
		return nil, fmt.Errorf("decoding saga %s %s: %w", h.saga.name, in.ID(), err)
	}

	in.State = in.doc.State
	return in, nil
}

// ID returns the id of the saga as text, because it travels in headers and keys. WithIDs selects the type in which it is stored.
func (in *Instance[S]) ID() string { return sagas.FormatID(in.id) }

// Message returns the message that the step handles. It must not be changed.
func (in *Instance[S]) Message() *consumer.Message { return in.message }

// Complete ends the saga when the step succeeds. The events of the step are emitted. Pending
// timeouts are canceled, and held messages and compensations are discarded. The document stays as a
// tombstone: see WithTombstone.
func (in *Instance[S]) Complete() { in.completed = true }

// Emit appends the events to the outbox when the step succeeds, together with the new state and in
// the order of the calls. An event without the header saga-id gets it, and an event without a cause gets that of the message.
func (in *Instance[S]) Emit(events ...event.Event) {
	for _, ev := range events {
		in.out.events = append(in.out.events, in.connectEvent(ev))
	}
}

// connectEvent returns ev with the header saga-id and the cause of the message, unless ev has its own.
func (in *Instance[S]) connectEvent(ev event.Event) event.Event {
	// The context of the step has another cause if the message was held: that of the message which released it.
	ev = ev.With(event.WithCause(ev.Cause().Or(in.message.Cause())))
	if _, ok := ev.Header(HeaderID); ok {
		return ev
	}
	return ev.With(event.WithHeader(HeaderID, []byte(in.ID())))
}

// addProblem makes the step fail when it returns.
func (in *Instance[S]) addProblem(format string, args ...any) {
	err := fmt.Errorf(format, args...)
	in.problems = append(in.problems, fmt.Errorf("saga %s %s: %w", in.h.saga.name, in.ID(), err))
}

// commitStep stores the instance and its events. It writes the state first: if another step was
// faster, nothing else is written.
func (in *Instance[S]) commitStep(ctx context.Context) error {
	saga := in.h.saga
	in.doc.State = in.State

	// A complete saga waits for nothing and compensates nothing.
	if in.completed {
		in.cancelTimeouts()
		in.doc.Compensations = nil
		in.doc.Held = nil
		in.doc.Stuck = nil
	}

	body, err := bson.Marshal(in.doc)
	if err != nil {
		return fmt.Errorf("encoding saga %s %s: %w", saga.name, in.ID(), err)
	}

	in.record.Body = body
	saved := in.record
	if in.completed {
		err = in.h.store.Complete(ctx, saga.name, in.record, saga.settings.keep)
	} else {
		saved, err = in.h.store.Save(ctx, saga.name, in.record)
	}
	if err != nil {
		return err
	}

	if err := in.appendToOutbox(ctx, saved.UpdatedAt); err != nil {
		return fmt.Errorf("saga %s %s: %w", saga.name, in.ID(), err)
	}
	return nil
}

// appendToOutbox appends all events with one insert command and cancels timeouts. now is the server's time when the state was
// stored.
func (in *Instance[S]) appendToOutbox(ctx context.Context, now time.Time) error {
	events := in.out.events
	for _, t := range in.out.timeouts {
		events = append(events, t.event.With(event.WithDueAt(now.Add(t.after))))
	}

	for _, id := range in.out.cancel {
		// A timeout that is being sent already is ignored when it arrives.
		if err := in.h.box.Cancel(ctx, id); err != nil && !errors.Is(err, outbox.ErrNotScheduled) {
			return fmt.Errorf("canceling a timeout: %w", err)
		}
	}

	if len(events) == 0 {
		return nil
	}
	return in.h.box.Append(ctx, events...)
}
