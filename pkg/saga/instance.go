package saga

import (
	"context"
	"fmt"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/pkg/event"
)

// Instance is one saga as a step sees it. It belongs to the step's goroutine and ends with the step.
type Instance[S any, I Identifier] struct {
	// State is what the saga knows: the zero value at its start. The step changes it in place.
	State S

	h         *handler[S, I]
	id        I
	record    Record
	doc       document[S]
	out       *outgoing
	completed bool
}

// document is what is stored of an instance beside the Store's own fields.
type document[S any] struct {
	State S `bson:"state"`
	// Waiting: nothing but held messages so far; no step has run.
	Waiting       bool       `bson:"waiting,omitempty"`
	Timeouts      []timer    `bson:"timeouts,omitempty"`
	Compensations []bson.Raw `bson:"compensations,omitempty"` // envelopes, oldest first
	Sequence      int64      `bson:"sequence,omitempty"`      // number of the last message that was handled in sequence
	Held          []held     `bson:"held,omitempty"`          // by number
	Stuck         *stuck     `bson:"stuck,omitempty"`         // the first of them, if its step failed
}

// instance makes what a step works on from the stored record, afresh for each attempt.
func (h *handler[S, I]) instance(rec Record, found bool, id I) (*Instance[S, I], error) {
	in := &Instance[S, I]{h: h, id: id, record: rec, out: &outgoing{id: FormatID(id)}}
	if !found {
		in.record = Record{ID: id}
		in.doc.Waiting = true
		return in, nil
	}
	if err := bson.Unmarshal(rec.Body, &in.doc); err != nil {
		return nil, fmt.Errorf("decoding saga %s %s: %w", h.saga.name, FormatID(id), err)
	}
	in.State = in.doc.State
	return in, nil
}

// ID is the saga's id.
func (in *Instance[S, I]) ID() I { return in.id }

// Version is how often the saga was changed before this step: 0 at its start.
func (in *Instance[S, I]) Version() int64 { return in.record.Version }

// Complete ends the saga when the step succeeds: its timeouts are cancelled, messages that it holds and compensations
// that were not asked for are forgotten, and what the step emits goes out. See WithTombstone for what is left of it.
func (in *Instance[S, I]) Complete() { in.completed = true }

// Emit appends the events to the outbox together with the state when the step succeeds, in the order of the calls, with the
// header saga-id unless they have one.
func (in *Instance[S, I]) Emit(events ...event.Event) { in.out.add(events) }

// commit writes the state first: if another step was faster, nothing else is written.
func (in *Instance[S, I]) commit(ctx context.Context) error {
	s := in.h.saga
	in.doc.State = in.State
	if in.completed {
		in.cancelTimeouts()
		in.doc.Compensations, in.doc.Held, in.doc.Stuck = nil, nil, nil
	}
	body, err := bson.Marshal(in.doc)
	if err != nil {
		return fmt.Errorf("encoding saga %s %s: %w", s.name, FormatID(in.id), err)
	}
	in.record.Body = body
	if err := in.save(ctx); err != nil {
		return err
	}
	if err := in.out.flush(ctx, s.reg.outbox); err != nil {
		return fmt.Errorf("saga %s %s: %w", s.name, FormatID(in.id), err)
	}
	return nil
}

func (in *Instance[S, I]) save(ctx context.Context) error {
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
	in.out.now = saved.UpdatedAt
	return nil
}

// milliseconds rounds a wait up to what a due time can say.
func milliseconds(d time.Duration) time.Duration {
	return (d + time.Millisecond - 1).Truncate(time.Millisecond)
}
