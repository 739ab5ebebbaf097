package saga

import (
	"context"
	"fmt"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/pkg/event"
)

// Instance is one saga during a step. It belongs to the goroutine of the step and must not be used
// after the step.
type Instance[S any, I Identifier] struct {
	// State is the state of the saga. It is the zero value when the saga starts. The step changes
	// it in place.
	State S

	h         *handler[S, I]
	id        I
	record    Record
	doc       document[S]
	out       *outgoing
	completed bool
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

// newInstance returns an instance with the state of the stored record. Each attempt of a step gets
// a new one.
func (h *handler[S, I]) newInstance(rec Record, found bool, id I) (*Instance[S, I], error) {
	in := &Instance[S, I]{h: h, id: id, record: rec, out: &outgoing{id: FormatID(id)}}
	if !found {
		in.record = Record{ID: id}

		// No step has run yet.
		in.doc.Waiting = true
		return in, nil
	}
	if err := bson.Unmarshal(rec.Body, &in.doc); err != nil {
		return nil, fmt.Errorf("decoding saga %s %s: %w", h.saga.name, FormatID(id), err)
	}

	in.State = in.doc.State
	return in, nil
}

// ID returns the id of the saga.
func (in *Instance[S, I]) ID() I { return in.id }

// Version returns the number of changes of the saga before this step. It is 0 when the saga starts.
func (in *Instance[S, I]) Version() int64 { return in.record.Version }

// Complete ends the saga when the step succeeds. The events of the step are emitted. Pending
// timeouts are canceled, and held messages and compensations are discarded. The document is
// deleted, or kept for the time of WithTombstone.
func (in *Instance[S, I]) Complete() { in.completed = true }

// Emit appends the events to the outbox when the step succeeds, together with the new state and in
// the order of the calls. An event without the header saga-id gets it.
func (in *Instance[S, I]) Emit(events ...event.Event) { in.out.addEvents(events) }

// commitStep stores the instance and its events. It writes the state first: if another step was
// faster, nothing else is written.
func (in *Instance[S, I]) commitStep(ctx context.Context) error {
	s := in.h.saga
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
		return fmt.Errorf("encoding saga %s %s: %w", s.name, FormatID(in.id), err)
	}

	in.record.Body = body
	if err := in.saveRecord(ctx); err != nil {
		return err
	}
	if err := in.out.appendToOutbox(ctx, s.reg.outbox); err != nil {
		return fmt.Errorf("saga %s %s: %w", s.name, FormatID(in.id), err)
	}

	return nil
}

// saveRecord stores the state, or completes the saga.
func (in *Instance[S, I]) saveRecord(ctx context.Context) error {
	s := in.h.saga
	if in.completed {
		r := in.record
		if s.unguarded && r.Version > 0 {
			r.Version = AnyVersion
		}
		return s.reg.store.Complete(ctx, s.name, r, s.keep)
	}

	saved, err := s.reg.store.Save(ctx, s.name, in.record)
	if err != nil {
		return err
	}

	// Timeouts are counted from the server's clock.
	in.out.now = saved.UpdatedAt
	return nil
}

// ceilMilliseconds rounds d up to milliseconds, the precision of a due time.
func ceilMilliseconds(d time.Duration) time.Duration {
	return (d + time.Millisecond - 1).Truncate(time.Millisecond)
}
