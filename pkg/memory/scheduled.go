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

// Schedule appends the event to be delivered at that time by the relay's clock.
func (b *Outbox) Schedule(ctx context.Context, ev event.Event, at time.Time, opts ...outbox.CallOption) (event.ID, error) {
	if err := b.AppendMany(ctx, []event.Event{ev.With(event.WithDueAt(at))}, opts...); err != nil {
		return event.ID{}, err
	}
	return ev.ID(), nil
}

// Cancel takes a scheduled event back; outbox.ErrNotScheduled says that it cannot be had any more.
func (b *Outbox) Cancel(ctx context.Context, id event.ID, opts ...outbox.CallOption) error {
	err := b.change(ctx, id, opts, func(*envelope) (any, error) { return nil, nil })
	if err != nil {
		return fmt.Errorf("cancelling event %s: %w", id, err)
	}
	return nil
}

// Reschedule moves a scheduled event to another time, otherwise as Cancel.
func (b *Outbox) Reschedule(ctx context.Context, id event.ID, at time.Time, opts ...outbox.CallOption) error {
	var err error
	if at.Year() < 1970 || at.Year() > 9999 {
		err = fmt.Errorf("the year %d; 1970 to 9999 is allowed", at.Year())
	} else {
		err = b.change(ctx, id, opts, func(e *envelope) (any, error) { return e.dueAt(at) })
	}
	if err != nil {
		return fmt.Errorf("rescheduling event %s: %w", id, err)
	}
	return nil
}

// dueAt is a copy of the envelope that is due at another time.
func (e *envelope) dueAt(at time.Time) (*envelope, error) {
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
	moved.doc, moved.ev.dueAt = raw, time.UnixMilli(at.UnixMilli()).UTC()
	return &moved, nil
}

// change writes what to makes of a scheduled envelope, unless a relay has taken it.
func (b *Outbox) change(ctx context.Context, id event.ID, opts []outbox.CallOption, to func(*envelope) (any, error)) error {
	if err := noSession(opts); err != nil {
		return err
	}
	if id.IsZero() {
		return errors.New("the id is zero")
	}
	return b.db.do(ctx, func(t *tx) error {
		key, err := encodeKey(id)
		if err != nil {
			return err
		}
		e, _ := t.get(b.rows, key).(*envelope)
		if e == nil || !e.waits() {
			return refuse(outbox.ErrNotScheduled)
		}
		value, err := to(e)
		if err != nil {
			return err
		}
		return t.put(b.rows, key, value)
	})
}

// waits reports whether the envelope is scheduled and no relay has taken it.
func (e *envelope) waits() bool { return !e.ev.dueAt.IsZero() && !e.claim }

// Scheduled reads a page of the scheduled events of a query.
func (b *Outbox) Scheduled(ctx context.Context, q outbox.ScheduledQuery, opts ...outbox.CallOption) (outbox.ScheduledPage, error) {
	page, err := b.page(ctx, q, opts)
	if err != nil {
		return outbox.ScheduledPage{}, fmt.Errorf("reading scheduled events of %s: %w", b.collection, err)
	}
	return page, nil
}

func (b *Outbox) page(ctx context.Context, q outbox.ScheduledQuery, opts []outbox.CallOption) (outbox.ScheduledPage, error) {
	size := q.PageSize
	switch {
	case size == 0:
		size = outbox.DefaultPageSize
	case size < 0 || size > outbox.MaxPageSize:
		return outbox.ScheduledPage{}, fmt.Errorf("a page of %d; 1 to %d is allowed", size, outbox.MaxPageSize)
	}
	after, err := readPlace(q.After)
	if err != nil {
		return outbox.ScheduledPage{}, err
	}
	found, err := b.find(ctx, q, opts)
	if err != nil {
		return outbox.ScheduledPage{}, err
	}
	page := outbox.ScheduledPage{Total: int64(len(found)), Events: []outbox.ScheduledEvent{}}
	for _, e := range found {
		if after != nil && comparePlace(placeOf(e), *after) <= 0 {
			continue
		}
		if len(page.Events) == size {
			last := page.Events[size-1]
			page.Next = place{last.DueAt.UnixMilli(), mustKey(last.ID)}.String()
			break
		}
		page.Events = append(page.Events, outbox.ScheduledEvent{
			ID: e.id, AggregateType: e.ev.aggregateType, AggregateID: e.ev.aggregateID, Type: e.ev.typ, DueAt: e.ev.dueAt, ExpiresAt: e.ev.expiresAt,
		})
	}
	return page, nil
}

// SummarizeScheduled counts the scheduled events of a query by type, in the order of the types.
func (b *Outbox) SummarizeScheduled(ctx context.Context, q outbox.ScheduledQuery, opts ...outbox.CallOption) ([]outbox.ScheduledSummary, error) {
	found, err := b.find(ctx, q, opts)
	if err != nil {
		return nil, fmt.Errorf("summarising scheduled events of %s: %w", b.collection, err)
	}
	out := []outbox.ScheduledSummary{}
	for _, e := range found { // in the order of their times
		i := slices.IndexFunc(out, func(s outbox.ScheduledSummary) bool { return s.Type == e.ev.typ })
		if i < 0 {
			i = len(out)
			out = append(out, outbox.ScheduledSummary{Type: e.ev.typ, Earliest: e.ev.dueAt})
		}
		out[i].Count++
		out[i].Latest = e.ev.dueAt
	}
	slices.SortFunc(out, func(a, b outbox.ScheduledSummary) int { return cmp.Compare(a.Type, b.Type) })
	return out, nil
}

// CancelScheduled takes back the scheduled events of a query that no relay has taken yet, and returns how many those were.
func (b *Outbox) CancelScheduled(ctx context.Context, q outbox.ScheduledQuery, opts ...outbox.CallOption) (int64, error) {
	n, err := b.cancelAll(ctx, q, opts)
	if err != nil {
		return 0, fmt.Errorf("cancelling scheduled events of %s: %w", b.collection, err)
	}
	return n, nil
}

func (b *Outbox) cancelAll(ctx context.Context, q outbox.ScheduledQuery, opts []outbox.CallOption) (n int64, err error) {
	if !q.All && q.IDs == nil && q.Type == "" && q.AggregateType == "" && q.DueFrom.IsZero() && q.DueBefore.IsZero() {
		return 0, outbox.ErrEmptyQuery
	}
	if err := checkQuery(q, opts); err != nil {
		return 0, err
	}
	err = b.db.do(ctx, func(t *tx) error {
		found := b.matching(t, q)
		n = int64(len(found))
		for _, e := range found {
			if err := t.put(b.rows, mustKey(e.id), nil); err != nil {
				return err
			}
		}
		return nil
	})
	return n, err
}

func (b *Outbox) find(ctx context.Context, q outbox.ScheduledQuery, opts []outbox.CallOption) (found []*envelope, err error) {
	if err := checkQuery(q, opts); err != nil {
		return nil, err
	}
	err = b.db.do(ctx, func(t *tx) error {
		found = b.matching(t, q)
		return nil
	})
	return found, err
}

func checkQuery(q outbox.ScheduledQuery, opts []outbox.CallOption) error {
	if slices.ContainsFunc(q.IDs, event.ID.IsZero) {
		return errors.New("an id is zero")
	}
	return noSession(opts)
}

// matching are the envelopes of a query in the order of due time and id.
func (b *Outbox) matching(t *tx, q outbox.ScheduledQuery) []*envelope {
	var found []*envelope
	t.scan(b.rows, func(_ string, v any) {
		e := v.(*envelope)
		switch {
		case !e.waits():
		case q.IDs != nil && !slices.Contains(q.IDs, e.id):
		case q.Type != "" && q.Type != e.ev.typ:
		case q.AggregateType != "" && q.AggregateType != e.ev.aggregateType:
		case !q.DueFrom.IsZero() && e.ev.dueAt.Before(q.DueFrom):
		case !q.DueBefore.IsZero() && !e.ev.dueAt.Before(q.DueBefore):
		default:
			found = append(found, e)
		}
	})
	slices.SortFunc(found, func(a, b *envelope) int { return comparePlace(placeOf(a), placeOf(b)) })
	return found
}

// place is where an envelope stands in the order of a page.
type place struct {
	Due int64
	Key string
}

func placeOf(e *envelope) place { return place{e.ev.dueAt.UnixMilli(), mustKey(e.id)} }

func comparePlace(a, b place) int {
	return cmp.Or(cmp.Compare(a.Due, b.Due), cmp.Compare(a.Key, b.Key))
}

func mustKey(id event.ID) string {
	key, _ := encodeKey(id) // of an envelope that is stored
	return key
}

func (p place) String() string {
	raw, _ := bson.Marshal(bson.D{{Key: "d", Value: p.Due}, {Key: "i", Value: []byte(p.Key)}})
	return base64.RawURLEncoding.EncodeToString(raw)
}

func readPlace(text string) (*place, error) {
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
		return nil, fmt.Errorf("%q is not where a page ended", text)
	}
	return &place{*p.Due, string(p.Key)}, nil
}

func sortBySeq(list []*envelope) {
	slices.SortFunc(list, func(a, b *envelope) int { return cmp.Compare(a.seq, b.seq) })
}
