package outbox

import (
	"context"
	"fmt"
	"iter"
	"time"

	"github.com/outrelay/outrelay/internal/mongodb/transaction"
	"github.com/outrelay/outrelay/internal/service/agenda"
	"github.com/outrelay/outrelay/pkg/event"
)

// scheduledPageSize is the number of events that Scheduled reads at once.
const scheduledPageSize = 1000

// ScheduledQuery selects scheduled events that no watcher has claimed yet. An event must match all
// conditions that are set. Without a condition, the query selects all events.
type ScheduledQuery struct {
	// IDs selects events by id. If it is nil, events of any id match.
	IDs []event.ID

	// Name and AggregateType must match exactly. If empty, all values match.
	Name          string
	AggregateType string

	// From (inclusive) and Before (exclusive) limit the due time. Zero means no limit.
	From, Before time.Time

	// All allows CancelScheduled without a condition.
	All bool
}

// ScheduledEvent is an event that waits for its due time.
type ScheduledEvent struct {
	ID               event.ID
	Aggregate        event.Aggregate
	Name             string
	DueAt, ExpiresAt time.Time // ExpiresAt is zero if the event never expires
}

// Schedule appends the event for delivery at the time dueAt, which has millisecond precision and
// refers to the server's clock. If dueAt is in the past, the event is delivered at once. Schedule
// returns the id of the event, for Cancel and Reschedule, or the zero id if a middleware has left the
// event out. Like Append, it needs a transaction and returns the same errors.
//
// A scheduled event is not ordered with the other events of its key. It is delivered when it is
// due.
func (b *Box) Schedule(ctx context.Context, dueAt time.Time, ev event.Event) (event.ID, error) {
	envelopes, err := b.appendEvents(ctx, []event.Event{ev.With(event.WithDueAt(dueAt))})
	if err != nil {
		return event.ID{}, fmt.Errorf("appending to %s: %w", b.events.Collection, err)
	}
	if len(envelopes) == 0 {
		return event.ID{}, nil
	}
	return envelopes[0].ID, nil
}

// ScheduleIn is Schedule for the time delay from now, by the clock of MongoDB: a clock of this process that is wrong does not matter.
// It costs one more round trip. If the transaction runs again, the delay begins again. A negative delay means now.
func (b *Box) ScheduleIn(ctx context.Context, delay time.Duration, ev event.Event) (event.ID, error) {
	now, err := b.store.Now(ctx)
	if err != nil {
		return event.ID{}, fmt.Errorf("appending to %s: %w", b.events.Collection, err)
	}
	return b.Schedule(ctx, now.Add(max(delay, 0)), ev)
}

// Cancel removes a scheduled event. It returns ErrNotScheduled if the event does not wait any more.
// If ctx has a transaction, Cancel joins it. Otherwise it returns after a majority has stored the
// change.
func (b *Box) Cancel(ctx context.Context, id event.ID) error {
	err := b.changeScheduled(ctx, func() (bool, error) { return b.store.Cancel(ctx, id) })
	if err != nil {
		return fmt.Errorf("canceling event %s: %w", id, err)
	}
	return nil
}

// Reschedule moves a scheduled event to the time dueAt, whose year must be between 1970 and 9999. It
// returns the same errors as Cancel and treats transactions in the same way. The expiry of the
// event does not change: an event that has expired at its new due time is not delivered.
func (b *Box) Reschedule(ctx context.Context, id event.ID, dueAt time.Time) error {
	err := b.changeScheduled(ctx, func() (bool, error) { return b.store.Move(ctx, id, dueAt) })
	if err != nil {
		return fmt.Errorf("rescheduling event %s: %w", id, err)
	}
	return nil
}

// changeScheduled runs a change that reports whether the event was scheduled.
func (b *Box) changeScheduled(ctx context.Context, change func() (bool, error)) error {
	if err := transaction.CheckOptional(ctx); err != nil {
		return err
	}

	scheduled, err := change()
	transaction.RecordFailure(ctx, err)
	if err == nil && !scheduled {
		err = ErrNotScheduled
	}
	return err
}

// Scheduled iterates over the scheduled events that query selects, ordered by due time, and by id if the
// due times are equal. It ends after the first error. If ctx has a transaction, it reads in it.
//
// It reads pages of 1,000 events while the loop runs. If an event is scheduled or moved during the loop,
// the loop sees it only if its due time comes after the pages that were read.
func (b *Box) Scheduled(ctx context.Context, query ScheduledQuery) iter.Seq2[ScheduledEvent, error] {
	return func(yield func(ScheduledEvent, error) bool) {
		var page agenda.Page
		for first := true; first || page.Next != ""; first = false {
			// Each page checks again: the caller may have committed the transaction in the body of the loop.
			err := transaction.CheckOptional(ctx)
			if err == nil {
				page, err = b.store.ReadPage(ctx, query.toAgenda(), scheduledPageSize, page.Next)
			}
			if err != nil {
				yield(ScheduledEvent{}, fmt.Errorf("reading scheduled events of %s: %w", b.events.Collection, err))
				return
			}

			for _, e := range page.Events {
				if !yield(ScheduledEvent(e), nil) {
					return
				}
			}
		}
	}
}

// CancelScheduled removes the scheduled events that query selects and returns their number. Events that
// a watcher has claimed are not selected. A query without a condition returns ErrEmptyQuery unless
// All is set.
//
// If ctx has a transaction, CancelScheduled joins it. Otherwise each event is removed separately,
// and after an error some of them may be gone.
func (b *Box) CancelScheduled(ctx context.Context, query ScheduledQuery) (int64, error) {
	n, err := b.cancelMatching(ctx, query)
	if err != nil {
		return 0, fmt.Errorf("canceling scheduled events of %s: %w", b.events.Collection, err)
	}
	return n, nil
}

func (b *Box) cancelMatching(ctx context.Context, query ScheduledQuery) (int64, error) {
	if !query.All && query.toAgenda().IsEmpty() {
		return 0, ErrEmptyQuery
	}
	if err := transaction.CheckOptional(ctx); err != nil {
		return 0, err
	}

	n, err := b.store.CancelMatching(ctx, query.toAgenda())
	transaction.RecordFailure(ctx, err)
	return n, err
}

func (q ScheduledQuery) toAgenda() agenda.Query {
	return agenda.Query{IDs: q.IDs, Name: q.Name, AggregateType: q.AggregateType, From: q.From, Before: q.Before}
}
