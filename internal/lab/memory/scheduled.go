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

// Now returns the time.
func (s *outboxStore) Now(context.Context) (time.Time, error) { return time.Now(), nil }

// Cancel removes a scheduled event, and reports whether it was scheduled and not claimed.
func (s *outboxStore) Cancel(ctx context.Context, id event.ID) (bool, error) {
	return s.changeScheduled(ctx, id, func(*outboxEntry) (any, error) { return nil, nil })
}

// Move makes a scheduled event due at dueAt, and reports whether it was scheduled and not claimed.
func (s *outboxStore) Move(ctx context.Context, id event.ID, dueAt time.Time) (bool, error) {
	if err := agenda.CheckTime(dueAt); err != nil {
		return false, err
	}
	return s.changeScheduled(ctx, id, func(entry *outboxEntry) (any, error) { return entry.withDueAt(dueAt) })
}

// changeScheduled replaces a scheduled envelope by the result of change, unless a relay has claimed it.
// A nil result removes the envelope.
func (s *outboxStore) changeScheduled(
	ctx context.Context, id event.ID, change func(*outboxEntry) (any, error),
) (found bool, err error) {
	if id.IsZero() {
		return false, errors.New("the id is zero")
	}

	return runResult(ctx, s.db, func(tx *tx) (bool, error) {
		key := mustKey(id)
		entry, _ := tx.getRow(s.rows, key).(*outboxEntry)
		// A claimed event may be in the topic already.
		if entry == nil || !entry.isWaiting() {
			return false, nil
		}

		value, err := change(entry)
		if err != nil {
			return true, err
		}
		return true, tx.putRow(s.rows, key, value)
	})
}

// withDueAt returns a copy of the envelope that is due at dueAt.
func (e *outboxEntry) withDueAt(dueAt time.Time) (*outboxEntry, error) {
	var doc bson.D
	if err := bson.Unmarshal(e.doc, &doc); err != nil {
		return nil, fmt.Errorf("reading a stored event: %w", err)
	}

	for i := range doc {
		if doc[i].Key == "dueAt" {
			doc[i].Value = bson.NewDateTimeFromTime(dueAt)
		}
	}

	raw, err := bson.Marshal(doc)
	if err != nil {
		return nil, fmt.Errorf("writing a stored event: %w", err)
	}

	moved := *e
	moved.doc = raw
	// BSON has milliseconds.
	moved.fields.dueAt = time.UnixMilli(dueAt.UnixMilli()).UTC()
	return &moved, nil
}

// isWaiting reports whether the envelope is scheduled and no relay has claimed it.
func (e *outboxEntry) isWaiting() bool { return !e.fields.dueAt.IsZero() && !e.claimed }

// ReadPage returns all scheduled events that query selects, in one page.
func (s *outboxStore) ReadPage(ctx context.Context, query agenda.Query, _ int, _ string) (page agenda.Page, err error) {
	err = s.runQuery(ctx, query, func(_ *tx, found []*outboxEntry) error {
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

// CancelMatching removes the scheduled events that query selects and returns their number.
func (s *outboxStore) CancelMatching(ctx context.Context, query agenda.Query) (n int64, err error) {
	err = s.runQuery(ctx, query, func(tx *tx, found []*outboxEntry) (err error) {
		keys := make([]string, len(found))
		for i, e := range found {
			keys[i] = mustKey(e.id)
		}
		n, err = tx.removeRows(s.rows, keys...)
		return err
	})
	return n, err
}

// runQuery calls use with the envelopes that query selects, sorted by due time and id.
func (s *outboxStore) runQuery(ctx context.Context, query agenda.Query, use func(tx *tx, found []*outboxEntry) error) error {
	if slices.ContainsFunc(query.IDs, event.ID.IsZero) {
		return errors.New("an id is zero")
	}

	return s.db.runOperation(ctx, func(tx *tx) error {
		var found []*outboxEntry
		for _, e := range rowsOf[*outboxEntry](tx, s.rows) {
			if e.isWaiting() && e.isSelectedBy(query) {
				found = append(found, e)
			}
		}

		slices.SortFunc(found, compareDue)
		return use(tx, found)
	})
}

// isSelectedBy reports whether query selects the envelope.
func (e *outboxEntry) isSelectedBy(query agenda.Query) bool {
	switch fields := e.fields; {
	case query.IDs != nil && !slices.Contains(query.IDs, e.id),
		query.Name != "" && query.Name != fields.typ,
		query.AggregateType != "" && query.AggregateType != fields.aggregateType,
		!query.From.IsZero() && fields.dueAt.Before(query.From),
		!query.Before.IsZero() && !fields.dueAt.Before(query.Before):
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
