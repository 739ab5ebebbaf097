package admin

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/pkg/event"
	"github.com/outrelay/outrelay/pkg/outbox"
)

// ScheduledFilter says which scheduled envelopes, as people type it. What is set must hold all together. Envelopes that a
// watcher has taken to send are not among them.
type ScheduledFilter struct {
	Collection    string   // an outbox as database.collection; "" is all of the watcher's
	IDs           []string // as in the header `id`
	Type          string
	AggregateType string
	From, To      time.Time // due at From or later, before To
	All           bool      // lets a filter without any condition cancel
}

// Scheduled is an envelope that waits for its time.
type Scheduled struct {
	Collection    string    `json:"collection"`
	ID            string    `json:"id"`
	Type          string    `json:"type"`
	AggregateType string    `json:"aggregate_type"`
	AggregateID   string    `json:"aggregate_id"`
	DueAt         time.Time `json:"due_at"`
	ExpiresAt     time.Time `json:"expires_at,omitzero"`
}

// ScheduledPage is a part of what a filter finds: collection by collection, in each in the order of the due times.
type ScheduledPage struct {
	Events []Scheduled `json:"events"`
	Total  int64       `json:"total"` // of all that the filter finds, whatever the page
	Next   string      `json:"next,omitempty"`
}

// ScheduledGroup counts scheduled envelopes of one type in all collections.
type ScheduledGroup struct {
	Type     string    `json:"type"`
	Count    int64     `json:"count"`
	Earliest time.Time `json:"earliest"`
	Latest   time.Time `json:"latest"`
}

// ErrNothingSaid refuses to cancel everything because nothing was said.
var ErrNothingSaid = errors.New("no condition says which scheduled envelopes; ask for all of them if that is meant")

// ScheduledList reads a page of up to limit envelopes, [DefaultPage] if it is 0 or less; after is Next of the page before.
func (o Operator) ScheduledList(ctx context.Context, f ScheduledFilter, limit int, after string) (ScheduledPage, error) {
	if limit <= 0 {
		limit = DefaultPage
	}
	page := ScheduledPage{Events: []Scheduled{}}
	q, boxes, err := o.scheduled(ctx, f)
	if err != nil {
		return page, err
	}
	cut := max(strings.LastIndexByte(after, '/'), 0) // a collection's name may have one
	from, cursor := after[:cut], strings.TrimPrefix(after[cut:], "/")
	if after != "" && !slices.ContainsFunc(boxes, func(b scheduledBox) bool { return b.ns == from }) {
		return page, fmt.Errorf("the page before ended in %q, which is not among the collections of this one", from)
	}
	for _, b := range boxes {
		q.After, q.PageSize = "", max(limit-len(page.Events), 1)
		if b.ns == from {
			q.After = cursor
		}
		part, err := b.Scheduled(ctx, q)
		if err != nil {
			return page, fmt.Errorf("%s: %w", b.ns, err)
		}
		page.Total += part.Total
		if b.ns < from || page.Next != "" {
			continue // what came before, or what follows the page
		}
		if len(page.Events) == limit {
			if part.Total > 0 {
				page.Next = b.ns + "/"
			}
			continue
		}
		for _, e := range part.Events {
			page.Events = append(page.Events, Scheduled{
				Collection: b.ns, ID: e.ID.String(), Type: e.Type, AggregateType: e.AggregateType, AggregateID: e.AggregateID, DueAt: e.DueAt, ExpiresAt: e.ExpiresAt,
			})
		}
		if part.Next != "" {
			page.Next = b.ns + "/" + part.Next
		}
	}
	return page, nil
}

// ScheduledSummary counts by type, in the order of the types.
func (o Operator) ScheduledSummary(ctx context.Context, f ScheduledFilter) ([]ScheduledGroup, error) {
	q, boxes, err := o.scheduled(ctx, f)
	if err != nil {
		return nil, err
	}
	groups := []ScheduledGroup{}
	for _, b := range boxes {
		list, err := b.SummarizeScheduled(ctx, q)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", b.ns, err)
		}
		for _, s := range list {
			i, found := slices.BinarySearchFunc(groups, s.Type, func(g ScheduledGroup, t string) int { return strings.Compare(g.Type, t) })
			if !found {
				groups = slices.Insert(groups, i, ScheduledGroup{Type: s.Type, Earliest: s.Earliest.UTC(), Latest: s.Latest.UTC()})
			}
			g := &groups[i]
			g.Count += s.Count
			if s.Earliest.Before(g.Earliest) {
				g.Earliest = s.Earliest.UTC()
			}
			if s.Latest.After(g.Latest) {
				g.Latest = s.Latest.UTC()
			}
		}
	}
	return groups, nil
}

// ScheduledCancel takes back the envelopes that match and that no watcher has taken yet, and returns how many those were.
// progress, if not nil, hears of the number so far. A filter without a condition is [ErrNothingSaid] unless All is set. What
// was cancelled before an error stays so, and is in the events log.
func (o Operator) ScheduledCancel(ctx context.Context, f ScheduledFilter, progress func(int64)) (n int64, err error) {
	if f.Empty() && !f.All {
		return 0, ErrNothingSaid
	}
	q, boxes, err := o.scheduled(ctx, f)
	if err != nil {
		return 0, err
	}
	for _, b := range boxes {
		var part int64
		if part, err = b.CancelScheduled(ctx, q); err != nil {
			err = fmt.Errorf("%s: %w", b.ns, err)
			break
		}
		if n += part; progress != nil {
			progress(n)
		}
	}
	if n > 0 || err == nil {
		err = errors.Join(err, o.note(context.WithoutCancel(ctx), "scheduled_cancelled", append(f.audit(), bson.E{Key: "count", Value: n})))
	}
	return n, err
}

// Rescheduled is what became of the ids that were to be moved.
type Rescheduled struct {
	To    time.Time `json:"to"`
	Moved []string  `json:"moved"`
	// NotScheduled never were, were cancelled, or are on their way already.
	NotScheduled []string `json:"not_scheduled"`
}

// Reschedule moves the envelopes of ids to another time, as long as no watcher has taken them.
func (o Operator) Reschedule(ctx context.Context, f ScheduledFilter, to time.Time) (Rescheduled, error) {
	r := Rescheduled{To: to.UTC(), Moved: []string{}, NotScheduled: []string{}}
	_, boxes, err := o.scheduled(ctx, ScheduledFilter{Collection: f.Collection})
	if err != nil {
		return r, err
	}
	for _, text := range f.IDs {
		moved, err := reschedule(ctx, boxes, text, to)
		if err != nil {
			return r, errors.Join(err, o.noteRescheduled(ctx, f, r))
		}
		if moved {
			r.Moved = append(r.Moved, text)
		} else {
			r.NotScheduled = append(r.NotScheduled, text)
		}
	}
	return r, o.noteRescheduled(ctx, f, r)
}

func (o Operator) noteRescheduled(ctx context.Context, f ScheduledFilter, r Rescheduled) error {
	if len(r.Moved) == 0 {
		return nil
	}
	return o.note(context.WithoutCancel(ctx), "scheduled_moved", append(f.audit(), bson.E{Key: "to", Value: r.To}, bson.E{Key: "count", Value: len(r.Moved)}))
}

func reschedule(ctx context.Context, boxes []scheduledBox, text string, to time.Time) (bool, error) {
	for _, id := range idsOf(text) {
		for _, b := range boxes {
			err := b.Reschedule(ctx, id, to)
			if err == nil {
				return true, nil
			}
			if !errors.Is(err, outbox.ErrNotScheduled) {
				return false, fmt.Errorf("%s: %w", b.ns, err)
			}
		}
	}
	return false, nil
}

// scheduledBox is one of the watcher's outboxes.
type scheduledBox struct {
	*outbox.Box
	ns string
}

// scheduled are the query of a filter and the outboxes that it is for, in the order of their names.
func (o Operator) scheduled(ctx context.Context, f ScheduledFilter) (outbox.ScheduledQuery, []scheduledBox, error) {
	q := outbox.ScheduledQuery{Type: f.Type, AggregateType: f.AggregateType, DueFrom: f.From, DueBefore: f.To, All: f.All}
	if !f.From.IsZero() && !f.To.IsZero() && !f.From.Before(f.To) {
		return q, nil, fmt.Errorf("the window from %s to %s is empty", f.From.Format(time.RFC3339), f.To.Format(time.RFC3339))
	}
	for _, text := range f.IDs {
		if text == "" {
			return q, nil, errors.New("an id is empty")
		}
		q.IDs = append(q.IDs, idsOf(text)...)
	}
	names, err := o.Collections(ctx, f.Collection)
	if err != nil {
		return q, nil, err
	}
	slices.Sort(names)
	names = slices.Compact(names) // one that was dropped and made anew is claimed twice
	boxes := make([]scheduledBox, len(names))
	for i, ns := range names {
		db, coll, _ := strings.Cut(ns, ".")
		box, err := outbox.New(o.State.Client().Database(db), outbox.WithCollection(coll))
		if err != nil {
			return q, nil, err
		}
		boxes[i] = scheduledBox{box, ns}
	}
	return q, boxes, nil
}

// idsOf are the ids that a text may mean: a string may look like a UUID or an ObjectId.
func idsOf(text string) []event.ID {
	ids := []event.ID{event.ParseID(text)}
	if plain := event.NewID(text); plain != ids[0] {
		ids = append(ids, plain)
	}
	return ids
}

// Empty reports whether the filter has no condition but the collection.
func (f ScheduledFilter) Empty() bool {
	return len(f.IDs) == 0 && f.Type == "" && f.AggregateType == "" && f.From.IsZero() && f.To.IsZero()
}

// audit is the filter for the events log.
func (f ScheduledFilter) audit() bson.D {
	d := bson.D{}
	for _, c := range []struct{ name, value string }{{"collection", f.Collection}, {"type", f.Type}, {"aggregate_type", f.AggregateType}} {
		if c.value != "" {
			d = append(d, bson.E{Key: c.name, Value: c.value})
		}
	}
	if !f.From.IsZero() {
		d = append(d, bson.E{Key: "due_from", Value: f.From})
	}
	if !f.To.IsZero() {
		d = append(d, bson.E{Key: "due_before", Value: f.To})
	}
	if len(f.IDs) > 0 {
		d = append(d, bson.E{Key: "ids", Value: f.IDs[:min(len(f.IDs), 100)]})
	}
	return d
}
