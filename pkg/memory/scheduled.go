package memory

import (
	"cmp"
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"slices"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/pkg/event"
	"github.com/outrelay/outrelay/pkg/outbox"
)

// Schedule appends the event for delivery at the time at, by the clock of the database. It returns
// the id of the event. See outbox.Box.Schedule.
func (b *Outbox) Schedule(
	ctx context.Context, ev event.Event, at time.Time,
) (event.ID, error) {
	if err := b.AppendMany(ctx, []event.Event{ev.With(event.WithDueAt(at))}); err != nil {
		return event.ID{}, err
	}
	return ev.ID(), nil
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
func (b *Outbox) changeScheduled(
	ctx context.Context, id event.ID, to func(*outboxEntry) (any, error),
) error {
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

// Scheduled returns one page of the scheduled events that q selects. See outbox.Box.Scheduled.
func (b *Outbox) Scheduled(
	ctx context.Context, q outbox.ScheduledQuery,
) (outbox.ScheduledPage, error) {
	page, err := b.readPage(ctx, q)
	if err != nil {
		return outbox.ScheduledPage{}, fmt.Errorf("reading scheduled events of %s: %w", b.collection, err)
	}
	return page, nil
}

// readPage reads one page of the query.
func (b *Outbox) readPage(
	ctx context.Context, q outbox.ScheduledQuery,
) (outbox.ScheduledPage, error) {
	size := q.PageSize
	switch {
	case size == 0:
		size = outbox.DefaultPageSize
	case size < 0 || size > outbox.MaxPageSize:
		return outbox.ScheduledPage{}, fmt.Errorf("invalid page size %d: it must be between 1 and %d", size, outbox.MaxPageSize)
	}

	after, err := parsePagePosition(q.After)
	if err != nil {
		return outbox.ScheduledPage{}, err
	}

	found, err := b.findScheduled(ctx, q)
	if err != nil {
		return outbox.ScheduledPage{}, err
	}

	page := outbox.ScheduledPage{Total: int64(len(found)), Events: []outbox.ScheduledEvent{}}
	for _, e := range found {
		if after != nil && comparePositions(envelopePosition(e), *after) <= 0 {
			continue
		}
		if len(page.Events) == size {
			last := page.Events[size-1]
			page.Next = pagePosition{last.DueAt.UnixMilli(), mustKey(last.ID)}.String()
			break
		}

		page.Events = append(page.Events, outbox.ScheduledEvent{
			ID:            e.id,
			AggregateType: e.fields.aggregateType,
			AggregateID:   e.fields.aggregateID,
			Type:          e.fields.typ,
			DueAt:         e.fields.dueAt,
			ExpiresAt:     e.fields.expiresAt,
		})
	}

	return page, nil
}

// SummarizeScheduled counts the scheduled events that q selects by event type, sorted by type. See
// outbox.Box.SummarizeScheduled.
func (b *Outbox) SummarizeScheduled(
	ctx context.Context, q outbox.ScheduledQuery,
) ([]outbox.ScheduledSummary, error) {
	found, err := b.findScheduled(ctx, q)
	if err != nil {
		return nil, fmt.Errorf("summarizing scheduled events of %s: %w", b.collection, err)
	}

	out := []outbox.ScheduledSummary{}
	// The envelopes are sorted by due time, so the first one of a type is the earliest.
	for _, e := range found {
		i := slices.IndexFunc(out, func(s outbox.ScheduledSummary) bool { return s.Type == e.fields.typ })
		if i < 0 {
			i = len(out)
			out = append(out, outbox.ScheduledSummary{Type: e.fields.typ, Earliest: e.fields.dueAt})
		}

		out[i].Count++
		out[i].Latest = e.fields.dueAt
	}

	slices.SortFunc(out, func(a, b outbox.ScheduledSummary) int { return cmp.Compare(a.Type, b.Type) })
	return out, nil
}

// CancelScheduled removes the scheduled events that q selects and returns their number. See
// outbox.Box.CancelScheduled.
func (b *Outbox) CancelScheduled(
	ctx context.Context, q outbox.ScheduledQuery,
) (int64, error) {
	n, err := b.cancelMatching(ctx, q)
	if err != nil {
		return 0, fmt.Errorf("canceling scheduled events of %s: %w", b.collection, err)
	}
	return n, nil
}

// cancelMatching checks the query and removes the events.
func (b *Outbox) cancelMatching(
	ctx context.Context, q outbox.ScheduledQuery,
) (n int64, err error) {
	hasCondition := q.IDs != nil || q.Type != "" || q.AggregateType != "" || !q.DueFrom.IsZero() || !q.DueBefore.IsZero()
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
func (b *Outbox) findScheduled(
	ctx context.Context, q outbox.ScheduledQuery,
) (found []*outboxEntry, err error) {
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
		case q.Type != "" && q.Type != e.fields.typ:
		case q.AggregateType != "" && q.AggregateType != e.fields.aggregateType:
		case !q.DueFrom.IsZero() && e.fields.dueAt.Before(q.DueFrom):
		case !q.DueBefore.IsZero() && !e.fields.dueAt.Before(q.DueBefore):
		default:
			found = append(found, e)
		}
	})

	slices.SortFunc(found, func(a, b *outboxEntry) int { return comparePositions(envelopePosition(a), envelopePosition(b)) })
	return found
}

// pagePosition is the position of an envelope in the order of pages. Its text is
// ScheduledPage.Next.
type pagePosition struct {
	Due int64
	Key string
}

// envelopePosition returns the position of e.
func envelopePosition(e *outboxEntry) pagePosition {
	return pagePosition{e.fields.dueAt.UnixMilli(), mustKey(e.id)}
}

// comparePositions orders positions by due time and id.
func comparePositions(a, b pagePosition) int {
	return cmp.Or(cmp.Compare(a.Due, b.Due), cmp.Compare(a.Key, b.Key))
}

// mustKey returns the key of the row for the id of a stored envelope.
func mustKey(id event.ID) string {
	key, _ := encodeKey(id) // cannot fail: the envelope is stored
	return key
}

func (p pagePosition) String() string {
	raw, _ := bson.Marshal(bson.D{{Key: "d", Value: p.Due}, {Key: "i", Value: []byte(p.Key)}})
	return base64.RawURLEncoding.EncodeToString(raw)
}

// parsePagePosition returns nil for an empty text.
func parsePagePosition(text string) (*pagePosition, error) {
	if text == "" {
		return nil, nil
	}

	var p struct {
		Due *int64 `bson:"d"`
		Key []byte `bson:"i"`
	}
	raw, err := base64.RawURLEncoding.DecodeString(text)
	if err == nil {
		err = bson.Unmarshal(raw, &p)
	}
	if err != nil || p.Due == nil || len(p.Key) < 6 {
		return nil, fmt.Errorf("invalid page position %q: pass the Next of the previous page", text)
	}

	return &pagePosition{*p.Due, string(p.Key)}, nil
}

// sortBySeq sorts the envelopes in the order of their inserts.
func sortBySeq(list []*outboxEntry) {
	slices.SortFunc(list, func(a, b *outboxEntry) int { return cmp.Compare(a.seq, b.seq) })
}
