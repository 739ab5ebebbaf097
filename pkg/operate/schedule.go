package operate

import (
	"context"
	"iter"
	"time"

	"github.com/outrelay/outrelay/internal/operate/admin"
)

// ScheduledFilter selects scheduled events. An event matches if it fulfills all conditions that are set. An event that the relay
// has claimed to send it waits, and does not match.
type ScheduledFilter struct {
	Collection    string   // the outbox, as database.collection
	IDs           []string // nil: any; empty: none
	Type          string   // name of the event
	AggregateType string
	DueFrom       time.Time // due at this time or later
	DueBefore     time.Time // due before this time
	All           bool      // permits an action without any condition
}

func (f ScheduledFilter) toAdmin() admin.ScheduledFilter {
	return admin.ScheduledFilter{
		Collection: f.Collection, IDs: f.IDs, Type: f.Type, AggregateType: f.AggregateType, From: f.DueFrom, To: f.DueBefore, All: f.All,
	}
}

// ScheduledEvent is an event in an outbox that waits for its due time.
type ScheduledEvent struct {
	Collection    string // of the outbox, as database.collection
	ID            string
	Type          string // name of the event
	AggregateType string
	AggregateID   string
	DueAt         time.Time
	ExpiresAt     time.Time // zero if it does not expire
}

// Scheduled returns the scheduled events that match, collection by collection, and by due time within a collection.
func (o *Operator) Scheduled(ctx context.Context, filter ScheduledFilter) iter.Seq2[ScheduledEvent, error] {
	read := func(use admin.Operator, after string) ([]admin.Scheduled, string, error) {
		page, err := use.Schedule().List(ctx, filter.toAdmin(), admin.MaxScheduledPage, after)
		return page.Items, page.Next, err
	}
	return listAll(ctx, o, "list the scheduled events", read, func(stored *admin.Scheduled) ScheduledEvent {
		return ScheduledEvent{
			Collection: stored.Collection, ID: stored.ID, Type: stored.Type, AggregateType: stored.AggregateType, AggregateID: stored.AggregateID,
			DueAt: stored.DueAt, ExpiresAt: stored.ExpiresAt,
		}
	})
}

// ScheduledOptions change an action on scheduled events. The zero value is the default.
type ScheduledOptions struct {
	Progress func(done int64) // called with the number of events so far, from one goroutine; may be nil
}

// CancelScheduled removes the scheduled events that match from their outboxes, and returns their number. It returns [ErrInvalid]
// for a filter without a condition, unless All is set. If it fails, the events canceled until then stay canceled.
func (o *Operator) CancelScheduled(ctx context.Context, filter ScheduledFilter, options ScheduledOptions) (int64, error) {
	const doing = "cancel scheduled events"
	use, err := o.prepare(ctx)
	if err != nil {
		return 0, explain(doing, err)
	}
	done, err := use.Schedule().Cancel(ctx, filter.toAdmin(), options.Progress)
	return done.Cancelled, explain(doing, err)
}

// Reschedule moves the scheduled events that match to another due time, and returns the number of those that had another one. It
// returns [ErrInvalid] for a filter without a condition, unless All is set. If it fails, the events moved until then stay moved.
func (o *Operator) Reschedule(ctx context.Context, filter ScheduledFilter, dueAt time.Time, options ScheduledOptions) (int64, error) {
	const doing = "reschedule events"
	use, err := o.prepare(ctx)
	if err != nil {
		return 0, explain(doing, err)
	}
	moved, err := use.Schedule().Move(ctx, filter.toAdmin(), dueAt, options.Progress)
	return moved.Moved, explain(doing, err)
}
