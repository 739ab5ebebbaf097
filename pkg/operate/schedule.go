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
	Collection    string // the outbox, as database.collection
	IDs           []string
	Type          string // name of the event
	AggregateType string
	DueFrom       time.Time // due at this time or later
	DueBefore     time.Time // due before this time
	All           bool      // permits a cancellation without any condition
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
		return page.Events, page.Next, err
	}
	return listAll(ctx, o, "list the scheduled events", read, func(stored *admin.Scheduled) ScheduledEvent {
		return ScheduledEvent{
			Collection: stored.Collection, ID: stored.ID, Type: stored.Type, AggregateType: stored.AggregateType, AggregateID: stored.AggregateID,
			DueAt: stored.DueAt, ExpiresAt: stored.ExpiresAt,
		}
	})
}

// CancelScheduled removes the scheduled events that match from their outboxes, and returns their number. It returns [ErrInvalid]
// for a filter without a condition, unless All is set. If it fails, the events canceled until then stay canceled.
func (o *Operator) CancelScheduled(ctx context.Context, filter ScheduledFilter) (int64, error) {
	const doing = "cancel scheduled events"
	use, err := o.prepare(ctx)
	if err != nil {
		return 0, explain(doing, err)
	}
	count, err := use.Schedule().Cancel(ctx, filter.toAdmin(), nil)
	return count, explain(doing, err)
}

// Reschedule moves the scheduled events with these ids to another due time. It returns the ids of the events that it has moved:
// the others were never scheduled, are canceled, or are being sent. Outboxes are searched in the order of their names.
func (o *Operator) Reschedule(ctx context.Context, dueAt time.Time, ids ...string) (moved []string, err error) {
	const doing = "reschedule events"
	use, err := o.prepare(ctx)
	if err != nil {
		return nil, explain(doing, err)
	}
	outcome, err := use.Schedule().Move(ctx, admin.ScheduledFilter{IDs: ids}, dueAt)
	return outcome.Moved, explain(doing, err)
}
