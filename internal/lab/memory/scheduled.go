package memory

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/service/agenda"
	"github.com/outrelay/outrelay/pkg/event"
)

// Cancel removes a scheduled event, and reports whether it was scheduled and not claimed.
func (s *outboxStore) Cancel(ctx context.Context, id event.ID) (bool, error) {
	return s.changeScheduled(ctx, id, func(*outboxEntry) (any, error) { return nil, nil })
}

// Move makes a scheduled event due at the time at, and reports whether it was scheduled and not claimed.
func (s *outboxStore) Move(ctx context.Context, id event.ID, at time.Time) (bool, error) {
	if err := agenda.CheckTime(at); err != nil {
		return false, err
	}
	return s.changeScheduled(ctx, id, func(e *outboxEntry) (any, error) { return e.withDueAt(at) })
}

// changeScheduled replaces a scheduled envelope by the result of to, unless a relay has claimed it.
// A nil result removes the envelope.
func (s *outboxStore) changeScheduled(
	ctx context.Context, id event.ID, to func(*outboxEntry) (any, error),
) (found bool, err error) {
	if id.IsZero() {
		return false, errors.New("the id is zero")
	}

	return runResult(ctx, s.db, func(t *tx) (bool, error) {
		key := mustKey(id)
		e, _ := t.getRow(s.rows, key).(*outboxEntry)
		// A claimed event may be in the topic already.
		if e == nil || !e.isWaiting() {
			return false, nil
		}

		value, err := to(e)
		if err != nil {
			return true, err
		}
		return true, t.putRow(s.rows, key, value)
	})
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
	// BSON has milliseconds.
	moved.fields.dueAt = time.UnixMilli(at.UnixMilli()).UTC()
	return &moved, nil
}

// isWaiting reports whether the envelope is scheduled and no relay has claimed it.
func (e *outboxEntry) isWaiting() bool { return !e.fields.dueAt.IsZero() && !e.claimed }

// ReadPage returns all scheduled events that q selects, in one page.
func (s *outboxStore) ReadPage(ctx context.Context, q agenda.Query, _ int, _ string) (page agenda.Page, err error) {
	err = s.runQuery(ctx, q, func(_ *tx, found []*outboxEntry) error {
		page = agenda.Page{}
		for _, e := range found {
			page.Events = append(page.Events, agenda.Event{
				ID:        e.id,
				Aggregate: event.Aggregate{Type: e.fields.aggregateType, ID: e.fields.aggregateID},
				Name:      e.fields.typ,
				DueAt:     e.fields.dueAt,
				ExpiresAt: e.fields.expiresAt,
			})
		}

		return nil
	})
	return page, err
}

// CancelMatching removes the scheduled events that q selects and returns their number.
func (s *outboxStore) CancelMatching(ctx context.Context, q agenda.Query) (n int64, err error) {
	err = s.runQuery(ctx, q, func(t *tx, found []*outboxEntry) (err error) {
		keys := make([]string, len(found))
		for i, e := range found {
			keys[i] = mustKey(e.id)
		}
		n, err = t.removeRows(s.rows, keys...)
		return err
	})
	return n, err
}

// runQuery calls f with the envelopes that q selects, sorted by due time and id.
func (s *outboxStore) runQuery(ctx context.Context, q agenda.Query, f func(t *tx, found []*outboxEntry) error) error {
	if slices.ContainsFunc(q.IDs, event.ID.IsZero) {
		return errors.New("an id is zero")
	}

	return s.db.runOperation(ctx, func(t *tx) error {
		var found []*outboxEntry
		for _, e := range rowsOf[*outboxEntry](t, s.rows) {
			if e.isWaiting() && e.isSelectedBy(q) {
				found = append(found, e)
			}
		}

		slices.SortFunc(found, compareDue)
		return f(t, found)
	})
}

// isSelectedBy reports whether q selects the envelope.
func (e *outboxEntry) isSelectedBy(q agenda.Query) bool {
	switch f := e.fields; {
	case q.IDs != nil && !slices.Contains(q.IDs, e.id),
		q.Name != "" && q.Name != f.typ,
		q.AggregateType != "" && q.AggregateType != f.aggregateType,
		!q.From.IsZero() && f.dueAt.Before(q.From),
		!q.Before.IsZero() && !f.dueAt.Before(q.Before):
		return false
	}
	return true
}

// compareDue orders envelopes by due time and id.
func compareDue(a, b *outboxEntry) int {
	return cmp.Or(a.fields.dueAt.Compare(b.fields.dueAt), cmp.Compare(mustKey(a.id), mustKey(b.id)))
}

// mustKey returns the key of the row for an id, which BSON can always represent.
func mustKey(id event.ID) string {
	key, _ := encodeKey(id)
	return key
}
