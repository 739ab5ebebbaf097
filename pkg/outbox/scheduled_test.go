package outbox_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/pkg/event"
	"github.com/outrelay/outrelay/pkg/outbox"
)

var soon = time.UnixMilli(1_900_000_000_000).UTC()

// plan schedules an event of that type and id.
func (b bundle) plan(t *testing.T, typ string, id event.Option, at time.Time) event.ID {
	t.Helper()
	var out event.ID
	if err := outbox.Transaction(t.Context(), b.client, func(ctx context.Context) (err error) {
		out, err = b.box.Schedule(ctx, event.New("order", "o-1", typ, []byte("p"), id), at)
		return err
	}); err != nil {
		t.Fatal(err)
	}
	return out
}

func auto(*event.Event) {}

func (b bundle) ordinary(t *testing.T, typ string) {
	t.Helper()
	if err := outbox.Transaction(t.Context(), b.client, func(ctx context.Context) error { return b.box.Append(ctx, ev(typ)) }); err != nil {
		t.Fatal(err)
	}
}

func (b bundle) scheduledTypes(t *testing.T, q outbox.ScheduledQuery) []string {
	t.Helper()
	page, err := b.box.Scheduled(t.Context(), q)
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

func TestScheduledByEachCondition(t *testing.T) {
	t.Parallel()
	b, ctx := setup(t), t.Context()
	one := b.plan(t, "one", auto, soon)
	b.plan(t, "two", auto, soon.Add(time.Second))
	three := b.plan(t, "three", auto, soon.Add(2*time.Second))
	taken := b.plan(t, "taken", auto, soon)
	if _, err := b.coll.UpdateByID(ctx, taken, bson.D{{Key: "$set", Value: bson.D{{Key: "claim", Value: bson.D{{Key: "epoch", Value: 1}}}}}}); err != nil {
		t.Fatal(err)
	}
	b.ordinary(t, "ordinary")
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
		if diff := cmp.Diff(x.want, b.scheduledTypes(t, x.q)); diff != "" {
			t.Errorf("%s: %s", name, diff)
		}
	}
	page, err := b.box.Scheduled(ctx, outbox.ScheduledQuery{IDs: []event.ID{one}})
	if err != nil {
		t.Fatal(err)
	}
	want := []outbox.ScheduledEvent{{ID: one, AggregateType: "order", AggregateID: "o-1", Type: "one", DueAt: soon}}
	if diff := cmp.Diff(want, page.Events, cmp.Comparer(func(a, b event.ID) bool { return a == b })); diff != "" {
		t.Error(diff)
	}
}

// Every event is on one page, also where many are due at the same time and their ids are of different types.
func TestScheduledPages(t *testing.T) {
	t.Parallel()
	b, ctx := setup(t), t.Context()
	want := map[event.ID]bool{}
	for i := range 20 {
		want[b.plan(t, "x", auto, soon)] = true
		want[b.plan(t, "x", event.WithID(fmt.Sprint("text", i)), soon)] = true
		want[b.plan(t, "x", event.WithID(bson.NewObjectID()), soon.Add(time.Duration(i%3)*time.Second))] = true
	}
	for _, size := range []int{1, 7, 59, 60, 61} {
		q := outbox.ScheduledQuery{PageSize: size}
		seen, last, pages := map[event.ID]bool{}, time.Time{}, 0
		for {
			page, err := b.box.Scheduled(ctx, q)
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
	for _, q := range []outbox.ScheduledQuery{{PageSize: -1}, {PageSize: outbox.MaxPageSize + 1}, {After: "x"}, {After: "!"}, {IDs: []event.ID{{}}}} {
		if _, err := b.box.Scheduled(ctx, q); err == nil {
			t.Errorf("%+v was accepted", q)
		}
	}
}

func TestScheduledSummary(t *testing.T) {
	t.Parallel()
	b := setup(t)
	for i := range 5 {
		b.plan(t, []string{"a", "b"}[i%2], auto, soon.Add(time.Duration(i)*time.Second))
	}
	got, err := b.box.SummarizeScheduled(t.Context(), outbox.ScheduledQuery{})
	if err != nil {
		t.Fatal(err)
	}
	for i := range got {
		got[i].Earliest, got[i].Latest = got[i].Earliest.UTC(), got[i].Latest.UTC()
	}
	want := []outbox.ScheduledSummary{{"a", 3, soon, soon.Add(4 * time.Second)}, {"b", 2, soon.Add(time.Second), soon.Add(3 * time.Second)}}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}

func TestCancelScheduledByQuery(t *testing.T) {
	t.Parallel()
	b, ctx := setup(t), t.Context()
	b.plan(t, "keep", auto, soon)
	b.plan(t, "drop", auto, soon)
	b.plan(t, "drop", auto, soon)
	b.ordinary(t, "drop") // not scheduled
	if _, err := b.box.CancelScheduled(ctx, outbox.ScheduledQuery{}); !errors.Is(err, outbox.ErrEmptyQuery) {
		t.Errorf("an empty query: %v", err)
	}
	no := errors.New("no")
	if err := outbox.Transaction(ctx, b.client, func(ctx context.Context) error {
		if n, err := b.box.CancelScheduled(ctx, outbox.ScheduledQuery{All: true}); err != nil || n != 3 {
			t.Errorf("all: %d, %v", n, err)
		}
		return no
	}); !errors.Is(err, no) {
		t.Error(err)
	}
	if n, err := b.box.CancelScheduled(ctx, outbox.ScheduledQuery{Type: "drop"}); err != nil || n != 2 {
		t.Errorf("by type: %d, %v", n, err)
	}
	if n, err := b.box.CancelScheduled(ctx, outbox.ScheduledQuery{All: true}); err != nil || n != 1 {
		t.Errorf("the rest: %d, %v", n, err)
	}
	b.want(t, "drop")
}
