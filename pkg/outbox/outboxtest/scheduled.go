package outboxtest

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/pkg/event"
	"github.com/outrelay/outrelay/pkg/outbox"
)

var soon = time.UnixMilli(1_900_000_000_123).UTC()

func (f Fixture) dueAt(t *testing.T, id event.ID) time.Time {
	t.Helper()
	page, err := f.Box.Scheduled(t.Context(), outbox.ScheduledQuery{IDs: []event.ID{id}})
	if err != nil || len(page.Events) != 1 {
		t.Fatalf("%+v, %v", page, err)
	}
	return page.Events[0].DueAt
}

func scheduleAndCancel(t *testing.T, f Fixture) {
	ctx := t.Context()
	id := f.schedule(t, eventOf("later"), soon)
	if got := f.dueAt(t, id); !got.Equal(soon) {
		t.Errorf("due at %s, want %s", got, soon)
	}

	if err := f.Box.Reschedule(ctx, id, soon.Add(time.Hour)); err != nil {
		t.Fatal(err)
	}

	if got := f.dueAt(t, id); !got.Equal(soon.Add(time.Hour)) {
		t.Errorf("rescheduled to %s", got)
	}

	no := errors.New("no")
	if err := f.Transaction(ctx, func(ctx context.Context) error {
		if err := f.Box.Reschedule(ctx, id, soon); err != nil {
			t.Error(err)
		}

		if err := f.Box.Cancel(ctx, id); err != nil {
			t.Error(err)
		}

		return no
	}); !errors.Is(err, no) {
		t.Error(err)
	}

	if got := f.dueAt(t, id); !got.Equal(soon.Add(time.Hour)) {
		t.Errorf("after a rollback it is due at %s", got)
	}

	if err := f.Box.Cancel(ctx, id); err != nil {
		t.Fatal(err)
	}

	if err := f.Box.Cancel(ctx, id); !errors.Is(err, outbox.ErrNotScheduled) {
		t.Errorf("cancelled twice: %v", err)
	}

	if err := f.Box.Reschedule(ctx, id, soon); !errors.Is(err, outbox.ErrNotScheduled) {
		t.Errorf("rescheduled after it was cancelled: %v", err)
	}

	f.want(t)
}

func claimedIsOutOfReach(t *testing.T, f Fixture) {
	ctx := t.Context()
	id := f.schedule(t, eventOf("taken"), soon)
	f.Claim(t, id)
	now := eventOf("at once")
	f.append(t, now)
	for _, id := range []event.ID{id, now.ID(), event.NewID("no such")} {
		if err := f.Box.Cancel(ctx, id); !errors.Is(err, outbox.ErrNotScheduled) {
			t.Errorf("Cancel: %v", err)
		}

		if err := f.Box.Reschedule(ctx, id, soon); !errors.Is(err, outbox.ErrNotScheduled) {
			t.Errorf("Reschedule: %v", err)
		}
	}

	if n, err := f.Box.CancelScheduled(ctx, outbox.ScheduledQuery{All: true}); n != 0 || err != nil {
		t.Errorf("CancelScheduled: %d, %v", n, err)
	}

	// An answer of that kind is none of the store's errors: a transaction goes on.
	if err := f.Transaction(ctx, func(ctx context.Context) error {
		if err := f.Box.Cancel(ctx, id); !errors.Is(err, outbox.ErrNotScheduled) {
			t.Errorf("Cancel in a transaction: %v", err)
		}
		return f.Box.Append(ctx, eventOf("instead"))
	}); err != nil {
		t.Error(err)
	}

	f.want(t, "taken", "at once", "instead")
}

func nonsenseIsRefused(t *testing.T, f Fixture) {
	ctx := t.Context()
	if err := f.Box.Cancel(ctx, event.ID{}); err == nil || errors.Is(err, outbox.ErrNotScheduled) {
		t.Errorf("a zero id: %v", err)
	}

	if err := f.Box.Reschedule(ctx, event.NewID("x"), time.Time{}); err == nil || errors.Is(err, outbox.ErrNotScheduled) {
		t.Errorf("the zero time: %v", err)
	}

	if err := f.Transaction(ctx, func(ctx context.Context) error {
		_, err := f.Box.Schedule(ctx, eventOf("x"), time.Time{})
		return err
	}); !errors.Is(err, event.ErrInvalid) {
		t.Errorf("scheduled for the zero time: %v", err)
	}

	for _, q := range []outbox.ScheduledQuery{{PageSize: -1}, {PageSize: outbox.MaxPageSize + 1}, {After: "x"}, {After: "!"}, {IDs: []event.ID{{}}}} {
		if _, err := f.Box.Scheduled(ctx, q); err == nil {
			t.Errorf("%+v was accepted", q)
		}
	}
}

func (f Fixture) types(t *testing.T, q outbox.ScheduledQuery) []string {
	t.Helper()
	page, err := f.Box.Scheduled(t.Context(), q)
	if err != nil {
		t.Fatal(err)
	}

	if page.Total != int64(len(page.Events)) {
		t.Errorf("a total of %d with %d events", page.Total, len(page.Events))
	}

	types := []string{}
	for _, e := range page.Events {
		types = append(types, e.Type)
	}

	return types
}

func scheduledByCondition(t *testing.T, f Fixture) {
	one := f.schedule(t, eventOf("one"), soon)
	f.schedule(t, eventOf("two"), soon.Add(time.Second))
	three := f.schedule(t, eventOf("three"), soon.Add(2*time.Second))
	taken := f.schedule(t, eventOf("taken"), soon)
	f.Claim(t, taken)
	f.append(t, eventOf("ordinary"))
	for name, x := range map[string]struct {
		q    outbox.ScheduledQuery
		want []string
	}{
		"all":       {outbox.ScheduledQuery{}, []string{"one", "two", "three"}},
		"ids":       {outbox.ScheduledQuery{IDs: []event.ID{one, three, taken}}, []string{"one", "three"}},
		"no id":     {outbox.ScheduledQuery{IDs: []event.ID{}}, []string{}},
		"type":      {outbox.ScheduledQuery{Type: "two"}, []string{"two"}},
		"aggregate": {outbox.ScheduledQuery{AggregateType: "order"}, []string{"one", "two", "three"}},
		"no such":   {outbox.ScheduledQuery{AggregateType: "invoice"}, []string{}},
		"from":      {outbox.ScheduledQuery{DueFrom: soon.Add(time.Second)}, []string{"two", "three"}},
		"before":    {outbox.ScheduledQuery{DueBefore: soon.Add(time.Second)}, []string{"one"}},
		"both":      {outbox.ScheduledQuery{DueFrom: soon, DueBefore: soon.Add(2 * time.Second), Type: "two"}, []string{"two"}},
	} {
		equal(t, name, f.types(t, x.q), x.want)
	}

	expires := eventOf("expires", event.WithExpiresAt(soon.Add(time.Hour)))
	f.schedule(t, expires, soon)
	page, err := f.Box.Scheduled(t.Context(), outbox.ScheduledQuery{Type: "expires"})
	if err != nil {
		t.Fatal(err)
	}

	equal(t, "the event", page.Events, []outbox.ScheduledEvent{{
		ID: expires.ID(), AggregateType: "order", AggregateID: "o-1", Type: "expires", DueAt: soon, ExpiresAt: soon.Add(time.Hour),
	}})
}

// Every event is on one page, also where many are due at the same time and their ids are of different types.
func scheduledPages(t *testing.T, f Fixture) {
	want := map[event.ID]bool{}
	if err := f.Transaction(t.Context(), func(ctx context.Context) error {
		for i := range 20 {
			for _, opts := range [][]event.Option{nil, {event.WithID(fmt.Sprint("text", i))}, {event.WithID(bson.NewObjectID())}} {
				id, err := f.Box.Schedule(ctx, eventOf("x", opts...), soon.Add(time.Duration(i%3)*time.Second))
				if err != nil {
					return err
				}

				want[id] = true
			}
		}

		return nil
	}); err != nil {
		t.Fatal(err)
	}

	for _, size := range []int{1, 7, 59, 60, 61} {
		q := outbox.ScheduledQuery{PageSize: size}
		seen, last, pages := map[event.ID]bool{}, time.Time{}, 0
		for {
			page, err := f.Box.Scheduled(t.Context(), q)
			if err != nil {
				t.Fatal(err)
			}

			pages++
			if page.Total != 60 || len(page.Events) > size {
				t.Fatalf("%d of %d on a page of %d", len(page.Events), page.Total, size)
			}

			for _, e := range page.Events {
				if seen[e.ID] || !want[e.ID] || e.DueAt.Before(last) {
					t.Fatalf("%s is out of place", e.ID)
				}
				seen[e.ID], last = true, e.DueAt
			}

			if q.After = page.Next; q.After == "" {
				break
			}
		}

		if len(seen) != 60 || pages != (59+size)/size {
			t.Errorf("pages of %d: %d events on %d pages", size, len(seen), pages)
		}
	}
}

func scheduledSummary(t *testing.T, f Fixture) {
	for i := range 5 {
		f.schedule(t, eventOf([]string{"a", "b"}[i%2]), soon.Add(time.Duration(i)*time.Second))
	}

	got, err := f.Box.SummarizeScheduled(t.Context(), outbox.ScheduledQuery{})
	if err != nil {
		t.Fatal(err)
	}

	for i := range got {
		got[i].Earliest, got[i].Latest = got[i].Earliest.UTC(), got[i].Latest.UTC()
	}

	equal(t, "summary", got, []outbox.ScheduledSummary{
		{Type: "a", Count: 3, Earliest: soon, Latest: soon.Add(4 * time.Second)},
		{Type: "b", Count: 2, Earliest: soon.Add(time.Second), Latest: soon.Add(3 * time.Second)},
	})
}

func cancelByQuery(t *testing.T, f Fixture) {
	ctx := t.Context()
	f.schedule(t, eventOf("keep"), soon)
	f.schedule(t, eventOf("drop"), soon)
	f.schedule(t, eventOf("drop"), soon)
	f.append(t, eventOf("drop")) // not scheduled
	if _, err := f.Box.CancelScheduled(ctx, outbox.ScheduledQuery{}); !errors.Is(err, outbox.ErrEmptyQuery) {
		t.Errorf("an empty query: %v", err)
	}

	no := errors.New("no")
	if err := f.Transaction(ctx, func(ctx context.Context) error {
		if n, err := f.Box.CancelScheduled(ctx, outbox.ScheduledQuery{All: true}); err != nil || n != 3 {
			t.Errorf("all: %d, %v", n, err)
		}
		return no
	}); !errors.Is(err, no) {
		t.Error(err)
	}

	if n, err := f.Box.CancelScheduled(ctx, outbox.ScheduledQuery{Type: "drop"}); err != nil || n != 2 {
		t.Errorf("by type: %d, %v", n, err)
	}

	if n, err := f.Box.CancelScheduled(ctx, outbox.ScheduledQuery{All: true}); err != nil || n != 1 {
		t.Errorf("the rest: %d, %v", n, err)
	}

	f.want(t, "drop")
}
