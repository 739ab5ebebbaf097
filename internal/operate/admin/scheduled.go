package admin

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/relay/stored/outboxes"
	"github.com/outrelay/outrelay/internal/service/agenda"
	"github.com/outrelay/outrelay/pkg/event"
)

// ScheduledFilter selects scheduled envelopes by text that operators type. An envelope matches if
// it fulfills all conditions that are set. An envelope that a watcher has claimed to send it waits, and does not match.
type ScheduledFilter struct {
	Collection    string    `query:"collection" json:"collection,omitempty" maxLength:"255" doc:"Only this outbox, as database.collection."`
	IDs           []string  `query:"id" json:"ids,omitempty" maxItems:"1000" doc:"Only these envelopes, by their ids or by the rows of a list."`
	Type          string    `query:"type" json:"type,omitempty" maxLength:"255"`
	AggregateType string    `query:"aggregate_type" json:"aggregate_type,omitempty" maxLength:"255"`
	From          time.Time `query:"due_from" json:"due_from,omitzero" doc:"Due at this time or later."`
	To            time.Time `query:"due_before" json:"due_before,omitzero" doc:"Due before this time."`
	All           bool      `query:"-" json:"all,omitempty" doc:"Allows an action without a condition."`
}

// Scheduled is an envelope that waits for its due time.
type Scheduled struct {
	Row           string    `json:"row"` // names this envelope alone; the actions take it as an id
	Collection    string    `json:"collection"`
	ID            string    `json:"id"`
	Type          string    `json:"type"`
	AggregateType string    `json:"aggregate_type"`
	AggregateID   string    `json:"aggregate_id"`
	DueAt         time.Time `json:"due_at"`
	ExpiresAt     time.Time `json:"expires_at,omitzero"`
}

// ScheduledGroup counts the scheduled envelopes of one type in all collections.
type ScheduledGroup struct {
	Type     string    `json:"type"`
	Count    int64     `json:"count"`
	Earliest time.Time `json:"earliest"`
	Latest   time.Time `json:"latest"`
}

// Schedule is the set of the scheduled envelopes of a watcher.
type Schedule struct{ op Operator }

// List returns a page of up to limit envelopes, by default [DefaultPage]. after is Next of
// the previous page.
func (s Schedule) List(
	ctx context.Context, filter ScheduledFilter, limit int, after string,
) (Page[Scheduled], error) {
	if limit <= 0 {
		limit = DefaultPage
	}
	list, err := s.findOutboxes(ctx, filter, s.op.scheduledCollections)
	if err != nil {
		return newPage[Scheduled](), err
	}
	return listScheduled(ctx, list, limit, after)
}

// listScheduled returns a page of the events in outboxes that their queries select.
func listScheduled(ctx context.Context, list []scheduledOutbox, limit int, after string) (Page[Scheduled], error) {
	names := make([]string, len(list))
	outboxes := map[string]scheduledOutbox{}
	for i, outbox := range list {
		names[i] = outbox.ns
		outboxes[outbox.ns] = outbox
	}

	lister := collectionLister[Scheduled, string]{
		count: func(ns string) (int64, error) {
			n, err := agenda.Count(ctx, outboxes[ns].coll, outboxes[ns].query)
			return n, wrapError(ns, err)
		},
		read: func(ns string, after *string, limit int) (events []Scheduled, last *string, err error) {
			var cursor string
			if after != nil {
				cursor = *after
			}
			part, err := agenda.ReadPage(ctx, outboxes[ns].coll, outboxes[ns].query, limit, cursor)
			for i := range part.Events {
				events = append(events, newScheduled(ns, &part.Events[i]))
			}
			if part.Next != "" {
				last = &part.Next
			}
			return events, last, wrapError(ns, err)
		},
	}
	return lister.readPage(names, limit, after)
}

func newScheduled(ns string, event *agenda.Event) Scheduled {
	return Scheduled{
		Row:           nameRow(ns, event.ID.String()),
		Collection:    ns,
		ID:            event.ID.String(),
		Type:          event.Name,
		AggregateType: event.Aggregate.Type,
		AggregateID:   event.Aggregate.ID,
		DueAt:         event.DueAt,
		ExpiresAt:     event.ExpiresAt,
	}
}

// Summary counts the matching envelopes by type, sorted by type.
func (s Schedule) Summary(ctx context.Context, filter ScheduledFilter) ([]ScheduledGroup, error) {
	outboxes, err := s.findOutboxes(ctx, filter, s.op.scheduledCollections)
	if err != nil {
		return nil, err
	}

	groups := []ScheduledGroup{}
	compareType := func(group ScheduledGroup, eventType string) int { return strings.Compare(group.Type, eventType) }
	for _, outbox := range outboxes {
		list, err := agenda.Summarize(ctx, outbox.coll, outbox.query)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", outbox.ns, err)
		}

		for _, s := range list {
			i, found := slices.BinarySearchFunc(groups, s.Name, compareType)
			if !found {
				group := ScheduledGroup{Type: s.Name, Earliest: s.Earliest.UTC(), Latest: s.Latest.UTC()}
				groups = slices.Insert(groups, i, group)
			}

			group := &groups[i]
			group.Count += s.Count
			if s.Earliest.Before(group.Earliest) {
				group.Earliest = s.Earliest.UTC()
			}
			if s.Latest.After(group.Latest) {
				group.Latest = s.Latest.UTC()
			}
		}
	}
	return groups, nil
}

// Cancelled is the result of a cancellation.
type Cancelled struct {
	Cancelled int64 `json:"cancelled"`
	// NotScheduled are those ids of the filter that were not canceled: no envelope that matches was scheduled, or one is being sent.
	NotScheduled []string `json:"not_scheduled"`
}

// Cancel cancels the matching envelopes that no watcher has claimed yet. If progress is not nil, Cancel calls it with the number so
// far. It returns [ErrNoCondition] for a filter without conditions unless All is set. If it fails, the envelopes
// cancelled until then stay cancelled, and are in the audit log.
func (s Schedule) Cancel(ctx context.Context, filter ScheduledFilter, progress func(int64)) (out Cancelled, err error) {
	cancel := func(outbox *scheduledOutbox, report agenda.Report) (int64, error) {
		return agenda.CancelInParts(ctx, outbox.coll, outbox.query, report)
	}
	out.Cancelled, out.NotScheduled, err = s.changeEach(ctx, filter, progress, cancel)

	// WithoutCancel, because the envelopes are gone even if the caller is.
	if out.Cancelled > 0 || err == nil {
		fields := append(auditFields(filter), bson.E{Key: "count", Value: out.Cancelled})
		err = errors.Join(err, s.op.logAction(context.WithoutCancel(ctx), scheduledCancelled, fields))
	}
	return out, err
}

// Rescheduled is the result of a move of envelopes to another due time.
type Rescheduled struct {
	To    time.Time `json:"to"`
	Moved int64     `json:"moved"` // envelopes that had another due time before
	// NotScheduled are those ids of the filter that were not moved: no envelope that matches was scheduled, or one is being sent.
	NotScheduled []string `json:"not_scheduled"`
}

// Move moves the matching envelopes to another due time, unless a watcher has claimed them. Like Cancel, it looks into every outbox
// of the watcher, requires a condition or All, and calls progress with the number so far.
func (s Schedule) Move(ctx context.Context, filter ScheduledFilter, dueAt time.Time, progress func(int64)) (out Rescheduled, err error) {
	move := func(outbox *scheduledOutbox, report agenda.Report) (int64, error) {
		return agenda.MoveInParts(ctx, outbox.coll, outbox.query, dueAt, report)
	}
	out.To = dueAt.UTC()
	out.Moved, out.NotScheduled, err = s.changeEach(ctx, filter, progress, move)

	// WithoutCancel, because the envelopes are moved even if the caller is gone.
	if out.Moved > 0 {
		fields := append(auditFields(filter), bson.E{Key: "to", Value: out.To}, bson.E{Key: "count", Value: out.Moved})
		err = errors.Join(err, s.op.logAction(context.WithoutCancel(ctx), "scheduled_moved", fields))
	}
	return out, err
}

// changeEach calls change for each outbox, and returns the sum of its results, and those ids of the filter of which no envelope or not each
// envelope was changed. It ends with the first error, and returns the sum until then.
func (s Schedule) changeEach(
	ctx context.Context, filter ScheduledFilter, progress func(int64), change func(outbox *scheduledOutbox, report agenda.Report) (int64, error),
) (sum int64, notChanged []string, err error) {
	notChanged = []string{}
	if err := CheckSelection(filter, filter.All); err != nil {
		return 0, notChanged, err
	}
	outboxes, err := s.findOutboxes(ctx, filter, s.op.Collections)
	if err != nil {
		return 0, notChanged, err
	}
	missing, err := findMissing(filter.IDs, func(after string) (Page[Scheduled], error) {
		return listScheduled(ctx, outboxes, MaxScheduledPage, after)
	}, func(event *Scheduled) []string { return []string{event.Row, event.ID} })
	if err != nil {
		return 0, notChanged, err
	}

	missed := map[string]bool{}
	for i := range outboxes {
		outbox := &outboxes[i]
		n, err := change(outbox, agenda.Report{Did: addDone(progress, sum), Missed: func(id event.ID) {
			missed[id.String()], missed[nameRow(outbox.ns, id.String())] = true, true
		}})
		sum += n
		if err != nil {
			return sum, notChanged, fmt.Errorf("%s: %w", outbox.ns, err)
		}
	}

	unmissed := withoutNames(filter.IDs, missed)
	for _, text := range filter.IDs {
		if slices.Contains(missing, text) || !slices.Contains(unmissed, text) {
			notChanged = append(notChanged, text)
		}
	}
	return sum, notChanged, nil
}

// scheduledOutbox is an outbox with the query of a filter for it.
type scheduledOutbox struct {
	ns    string
	coll  *mongo.Collection
	query agenda.Query
}

// findOutboxes returns the outboxes that a filter applies to, sorted by name. list returns the names of all outboxes that are read or
// changed, or only the given one.
func (s Schedule) findOutboxes(
	ctx context.Context, filter ScheduledFilter, list func(ctx context.Context, only string) ([]string, error),
) ([]scheduledOutbox, error) {
	if err := checkWindow(filter.From, filter.To); err != nil {
		return nil, err
	}
	// An empty id would match nothing, and usually stems from an empty variable of a script.
	if slices.Contains(filter.IDs, "") {
		return nil, errors.New("an id is empty")
	}

	names, err := list(ctx, filter.Collection)
	if err == nil && len(names) == 0 {
		_, err = s.op.Collections(ctx, "")
	}
	if err != nil {
		return nil, err
	}

	found := make([]scheduledOutbox, len(names))
	for i, ns := range names {
		found[i] = scheduledOutbox{ns, mongodb.Majority(outboxes.CollectionOf(s.op.State.Client(), ns)), s.queryOf(ns, filter)}
	}
	return found, nil
}

// queryOf returns the query of a filter for one outbox.
func (s Schedule) queryOf(ns string, filter ScheduledFilter) agenda.Query {
	query := agenda.Query{Name: filter.Type, AggregateType: filter.AggregateType, From: filter.From, Before: filter.To, Mapping: s.op.Mapping}
	// An empty list selects nothing.
	if filter.IDs != nil {
		query.IDs = []event.ID{}
	}

	ids, rows := splitRows[string](filter.IDs, ns)
	for _, text := range slices.Concat(ids, rows) {
		query.IDs = append(query.IDs, parseIDs(text)...)
	}
	return query
}

// Empty reports whether the filter has no condition except the collection.
func (f ScheduledFilter) Empty() bool {
	return f.IDs == nil && f.Type == "" && f.AggregateType == "" && f.From.IsZero() && f.To.IsZero()
}
