package memory

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"iter"
	"slices"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/pkg/event"
	"github.com/outrelay/outrelay/pkg/outbox"
)

// Schedule appends the event for delivery at the time at, by the clock of the database. It returns
// the id of the event. See outbox.Box.Schedule.
func (b *Outbox) Schedule(ctx context.Context, at time.Time, ev event.Event) (event.ID, error) {
	list, err := b.appendEvents(ctx, []event.Event{ev.With(event.WithDueAt(at))})
	if err != nil {
		return event.ID{}, fmt.Errorf("appending to %s: %w", b.settings.Collection, err)
	}
	if len(list) == 0 {
		return event.ID{}, nil
	}
	return list[0].id, nil
}

// Cancel removes a scheduled event. It returns outbox.ErrNotScheduled if the event does not wait
// any more.
func (b *Outbox) Cancel(ctx context.Context, id event.ID) error {
	err := b.changeScheduled(ctx, id, func(*outboxEntry) (any, error) { return nil, nil })
	if err != nil {
		return fmt.Errorf("canceling event %s: %w", id, err)
	}
	return nil
}

// Reschedule moves a scheduled event to the time at. It returns the same errors as Cancel.
func (b *Outbox) Reschedule(ctx context.Context, id event.ID, at time.Time) error {
	var err error
	if at.Year() < 1970 || at.Year() > 9999 {
		err = fmt.Errorf("invalid year %d: it must be between 1970 and 9999", at.Year())
	} else {
		err = b.changeScheduled(ctx, id, func(e *outboxEntry) (any, error) { return e.withDueAt(at) })
	}

	if err != nil {
		return fmt.Errorf("rescheduling event %s: %w", id, err)
	}

	return nil
}

// withDueAt returns a copy of the envelope that is due at the time at.
func (e *outboxEntry) withDueAt(at time.Time) (*outboxEntry, error) {
	var doc bson.D
	if err := bson.Unmarshal(e.doc, &doc); err != nil {
		return nil, fmt.Errorf("reading a stored event: %w", err)
	}

	for i := range doc {
		if doc[i].Key == "dueAt" {
			doc[i].Value = bson.NewDateTimeFromTime(at)
		}
	}

	raw, err := bson.Marshal(doc)
	if err != nil {
		return nil, fmt.Errorf("writing a stored event: %w", err)
	}

	moved := *e
	moved.doc = raw
	moved.fields.dueAt = time.UnixMilli(at.UnixMilli()).UTC()
	return &moved, nil
}

// changeScheduled replaces a scheduled envelope by the result of to, unless a relay has claimed it.
// A nil result removes the envelope.
func (b *Outbox) changeScheduled(ctx context.Context, id event.ID, to func(*outboxEntry) (any, error)) error {
	if id.IsZero() {
		return errors.New("the id is zero")
	}

	return b.db.runOperation(ctx, func(t *tx) error {
		key, err := encodeKey(id)
		if err != nil {
			return err
		}

		e, _ := t.getRow(b.rows, key).(*outboxEntry)
		if e == nil || !e.isWaiting() {
			return newRefusal(outbox.ErrNotScheduled)
		}

		value, err := to(e)
		if err != nil {
			return err
		}

		return t.putRow(b.rows, key, value)
	})
}

// isWaiting reports whether the envelope is scheduled and no relay has claimed it.
func (e *outboxEntry) isWaiting() bool { return !e.fields.dueAt.IsZero() && !e.claimed }

// Scheduled iterates over the scheduled events that q selects. See outbox.Box.Scheduled.
func (b *Outbox) Scheduled(ctx context.Context, q outbox.ScheduledQuery) iter.Seq2[outbox.ScheduledEvent, error] {
	return func(yield func(outbox.ScheduledEvent, error) bool) {
		found, err := b.findScheduled(ctx, q)
		if err != nil {
			yield(outbox.ScheduledEvent{}, fmt.Errorf("reading scheduled events of %s: %w", b.settings.Collection, err))
			return
		}

		for _, e := range found {
			if !yield(e.scheduledEvent(), nil) {
				return
			}
		}
	}
}

// scheduledEvent returns the event as Scheduled lists it.
func (e *outboxEntry) scheduledEvent() outbox.ScheduledEvent {
	return outbox.ScheduledEvent{
		ID:        e.id,
		Aggregate: event.Aggregate{Type: e.fields.aggregateType, ID: e.fields.aggregateID},
		Name:      e.fields.typ,
		DueAt:     e.fields.dueAt,
		ExpiresAt: e.fields.expiresAt,
	}
}

// CancelScheduled removes the scheduled events that q selects and returns their number. See
// outbox.Box.CancelScheduled.
func (b *Outbox) CancelScheduled(ctx context.Context, q outbox.ScheduledQuery) (int64, error) {
	n, err := b.cancelMatching(ctx, q)
	if err != nil {
		return 0, fmt.Errorf("canceling scheduled events of %s: %w", b.settings.Collection, err)
	}
	return n, nil
}

// cancelMatching checks the query and removes the events.
func (b *Outbox) cancelMatching(ctx context.Context, q outbox.ScheduledQuery) (n int64, err error) {
	hasCondition := q.IDs != nil || q.Name != "" || q.AggregateType != "" || !q.From.IsZero() || !q.Before.IsZero()
	if !q.All && !hasCondition {
		return 0, outbox.ErrEmptyQuery
	}
	if err := checkQuery(q); err != nil {
		return 0, err
	}

	err = b.db.runOperation(ctx, func(t *tx) error {
		found := b.matchingEnvelopes(t, q)
		n = int64(len(found))
		for _, e := range found {
			if err := t.putRow(b.rows, mustKey(e.id), nil); err != nil {
				return err
			}
		}

		return nil
	})

	return n, err
}

// findScheduled returns the envelopes of the query, sorted by due time and id.
func (b *Outbox) findScheduled(ctx context.Context, q outbox.ScheduledQuery) (found []*outboxEntry, err error) {
	if err := checkQuery(q); err != nil {
		return nil, err
	}

	err = b.db.runOperation(ctx, func(t *tx) error {
		found = b.matchingEnvelopes(t, q)
		return nil
	})
	return found, err
}

// checkQuery checks the ids and the options of a query.
func checkQuery(q outbox.ScheduledQuery) error {
	if slices.ContainsFunc(q.IDs, event.ID.IsZero) {
		return errors.New("an id is zero")
	}
	return nil
}

// matchingEnvelopes returns the envelopes of the query that t sees, sorted by due time and id.
func (b *Outbox) matchingEnvelopes(t *tx, q outbox.ScheduledQuery) []*outboxEntry {
	var found []*outboxEntry
	t.scanRows(b.rows, func(_ string, v any) {
		e := v.(*outboxEntry)
		switch {
		case !e.isWaiting():
		case q.IDs != nil && !slices.Contains(q.IDs, e.id):
		case q.Name != "" && q.Name != e.fields.typ:
		case q.AggregateType != "" && q.AggregateType != e.fields.aggregateType:
		case !q.From.IsZero() && e.fields.dueAt.Before(q.From):
		case !q.Before.IsZero() && !e.fields.dueAt.Before(q.Before):
		default:
			found = append(found, e)
		}
	})

	slices.SortFunc(found, compareDue)
	return found
}

// compareDue orders envelopes by due time and id.
func compareDue(a, b *outboxEntry) int {
	return cmp.Or(a.fields.dueAt.Compare(b.fields.dueAt), cmp.Compare(mustKey(a.id), mustKey(b.id)))
}

// mustKey returns the key of the row for the id of a stored envelope.
func mustKey(id event.ID) string {
	key, _ := encodeKey(id) // cannot fail: the envelope is stored
	return key
}

// sortBySeq sorts the envelopes in the order of their inserts.
func sortBySeq(list []*outboxEntry) {
	slices.SortFunc(list, func(a, b *outboxEntry) int { return cmp.Compare(a.seq, b.seq) })
}
