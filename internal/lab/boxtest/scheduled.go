package boxtest

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

// soon is the due time of scheduled events, far in the future.
var soon = time.UnixMilli(1_900_000_000_123).UTC()

// readScheduled returns the events that query selects.
func (f Fixture) readScheduled(t *testing.T, query outbox.ScheduledQuery) []outbox.ScheduledEvent {
	t.Helper()
	list := []outbox.ScheduledEvent{}
	for e, err := range f.Box.Scheduled(t.Context(), query) {
		if err != nil {
			t.Fatal(err)
		}
		list = append(list, e)
	}

	return list
}

// readDueAt returns the due time of a scheduled event.
func (f Fixture) readDueAt(t *testing.T, id event.ID) time.Time {
	t.Helper()

	list := f.readScheduled(t, outbox.ScheduledQuery{IDs: []event.ID{id}})
	if len(list) != 1 {
		t.Fatalf("reading event %s: %+v", id, list)
	}

	return list[0].DueAt
}

func scheduleAndCancel(t *testing.T, fixture Fixture) {
	ctx := t.Context()
	id := fixture.scheduleEvent(t, newEvent("later"), soon)
	if got := fixture.readDueAt(t, id); !got.Equal(soon) {
		t.Errorf("due at %s, want %s", got, soon)
	}

	if err := fixture.Box.Reschedule(ctx, id, soon.Add(time.Hour)); err != nil {
		t.Fatal(err)
	}

	if got := fixture.readDueAt(t, id); !got.Equal(soon.Add(time.Hour)) {
		t.Errorf("rescheduled to %s, want %s", got, soon.Add(time.Hour))
	}

	no := errors.New("no")
	if err := fixture.Transaction(ctx, func(ctx context.Context) error {
		if err := fixture.Box.Reschedule(ctx, id, soon); err != nil {
			t.Error(err)
		}

		if err := fixture.Box.Cancel(ctx, id); err != nil {
			t.Error(err)
		}

		return no
	}); !errors.Is(err, no) {
		t.Error(err)
	}

	if got := fixture.readDueAt(t, id); !got.Equal(soon.Add(time.Hour)) {
		t.Errorf("due at %s after a rollback, want %s", got, soon.Add(time.Hour))
	}

	if err := fixture.Box.Cancel(ctx, id); err != nil {
		t.Fatal(err)
	}

	if err := fixture.Box.Cancel(ctx, id); !errors.Is(err, outbox.ErrNotScheduled) {
		t.Errorf("canceling twice: %v", err)
	}

	if err := fixture.Box.Reschedule(ctx, id, soon); !errors.Is(err, outbox.ErrNotScheduled) {
		t.Errorf("rescheduling a canceled event: %v", err)
	}

	fixture.checkTypes(t)
}

func claimedIsOutOfReach(t *testing.T, fixture Fixture) {
	ctx := t.Context()
	id := fixture.scheduleEvent(t, newEvent("taken"), soon)
	fixture.Claim(t, id)
	now := newEvent("at once")
	fixture.appendEvents(t, now)
	for _, id := range []event.ID{id, now.ID(), event.NewID("no such")} {
		if err := fixture.Box.Cancel(ctx, id); !errors.Is(err, outbox.ErrNotScheduled) {
			t.Errorf("Cancel: %v", err)
		}

		if err := fixture.Box.Reschedule(ctx, id, soon); !errors.Is(err, outbox.ErrNotScheduled) {
			t.Errorf("Reschedule: %v", err)
		}
	}

	if n, err := fixture.Box.CancelScheduled(ctx, outbox.ScheduledQuery{All: true}); n != 0 || err != nil {
		t.Errorf("CancelScheduled: %d, %v", n, err)
	}

	// ErrNotScheduled is not an error of the store, so the transaction can continue.
	if err := fixture.Transaction(ctx, func(ctx context.Context) error {
		if err := fixture.Box.Cancel(ctx, id); !errors.Is(err, outbox.ErrNotScheduled) {
			t.Errorf("Cancel in a transaction: %v", err)
		}
		return fixture.Box.Append(ctx, newEvent("instead"))
	}); err != nil {
		t.Error(err)
	}

	fixture.checkTypes(t, "at once", "instead")
}

// scheduledAfterADelay: the clock of the server and that of the test are the same here, apart from the time of the calls.
func scheduledAfterADelay(t *testing.T, fixture Fixture) {
	for delay, want := range map[time.Duration]time.Duration{20 * time.Minute: 20 * time.Minute, -time.Hour: 0} {
		var id event.ID
		before := time.Now().Truncate(time.Millisecond)
		if err := fixture.Transaction(t.Context(), func(ctx context.Context) (err error) {
			id, err = fixture.Box.ScheduleIn(ctx, delay, newEvent("later"))
			return err
		}); err != nil {
			t.Fatal(err)
		}

		list := fixture.readScheduled(t, outbox.ScheduledQuery{IDs: []event.ID{id}})
		if len(list) != 1 || list[0].DueAt.Before(before.Add(want)) || list[0].DueAt.After(time.Now().Add(want)) {
			t.Errorf("in %v: got %+v, want one event due %v after the call", delay, list, want)
		}
	}

	if _, err := fixture.Box.ScheduleIn(t.Context(), time.Hour, newEvent("lost")); !errors.Is(err, outbox.ErrNoTransaction) {
		t.Errorf("without a transaction: got %v, want %v", err, outbox.ErrNoTransaction)
	}
}

func nonsenseIsRejected(t *testing.T, fixture Fixture) {
	ctx := t.Context()
	if err := fixture.Box.Cancel(ctx, event.ID{}); err == nil || errors.Is(err, outbox.ErrNotScheduled) {
		t.Errorf("canceling the zero id: %v", err)
	}

	if err := fixture.Box.Reschedule(ctx, event.NewID("x"), time.Time{}); err == nil || errors.Is(err, outbox.ErrNotScheduled) {
		t.Errorf("rescheduling to the zero time: %v", err)
	}

	if err := fixture.Transaction(ctx, func(ctx context.Context) error {
		_, err := fixture.Box.Schedule(ctx, time.Time{}, newEvent("x"))
		return err
	}); !errors.Is(err, event.ErrInvalid) {
		t.Errorf("scheduling for the zero time: %v", err)
	}

	zero := outbox.ScheduledQuery{IDs: []event.ID{{}}}
	rounds := 0
	for _, err := range fixture.Box.Scheduled(ctx, zero) {
		rounds++
		if err == nil {
			t.Error("a query with a zero id was accepted")
		}
	}
	if rounds != 1 {
		t.Errorf("a query with a zero id: %d rounds, want 1", rounds)
	}

	if err := fixture.Transaction(ctx, func(ctx context.Context) error {
		if _, err := fixture.Box.CancelScheduled(ctx, zero); err == nil {
			t.Error("canceling with a zero id was accepted")
		}

		// Nothing was sent, so the transaction can continue.
		return fixture.Box.Append(ctx, newEvent("fine"))
	}); err != nil {
		t.Error(err)
	}
	fixture.checkTypes(t, "fine")
}

// scheduledTypes returns the types of the events that query selects.
func (f Fixture) scheduledTypes(t *testing.T, query outbox.ScheduledQuery) []string {
	t.Helper()
	types := []string{}
	for _, e := range f.readScheduled(t, query) {
		types = append(types, e.Name)
	}

	return types
}

func scheduledByCondition(t *testing.T, fixture Fixture) {
	one := fixture.scheduleEvent(t, newEvent("one"), soon)
	fixture.scheduleEvent(t, newEvent("two"), soon.Add(time.Second))
	three := fixture.scheduleEvent(t, newEvent("three"), soon.Add(2*time.Second))
	taken := fixture.scheduleEvent(t, newEvent("taken"), soon)
	fixture.Claim(t, taken)
	fixture.appendEvents(t, newEvent("ordinary"))

	for name, x := range map[string]struct {
		q    outbox.ScheduledQuery
		want []string
	}{
		"all":       {outbox.ScheduledQuery{}, []string{"one", "two", "three"}},
		"ids":       {outbox.ScheduledQuery{IDs: []event.ID{one, three, taken}}, []string{"one", "three"}},
		"no id":     {outbox.ScheduledQuery{IDs: []event.ID{}}, []string{}},
		"type":      {outbox.ScheduledQuery{Name: "two"}, []string{"two"}},
		"aggregate": {outbox.ScheduledQuery{AggregateType: "order"}, []string{"one", "two", "three"}},
		"no such":   {outbox.ScheduledQuery{AggregateType: "invoice"}, []string{}},
		"from":      {outbox.ScheduledQuery{From: soon.Add(time.Second)}, []string{"two", "three"}},
		"before":    {outbox.ScheduledQuery{Before: soon.Add(time.Second)}, []string{"one"}},
		"both":      {outbox.ScheduledQuery{From: soon, Before: soon.Add(2 * time.Second), Name: "two"}, []string{"two"}},
	} {
		checkEqual(t, name, fixture.scheduledTypes(t, x.q), x.want)
	}

	expires := newEvent("expires", event.WithExpiry(soon.Add(time.Hour)))
	fixture.scheduleEvent(t, expires, soon)
	checkEqual(t, "the event", fixture.readScheduled(t, outbox.ScheduledQuery{Name: "expires"}), []outbox.ScheduledEvent{{
		ID:        expires.ID(),
		Aggregate: event.Aggregate{Type: "order", ID: "o-1"},
		Name:      "expires",
		DueAt:     soon,
		ExpiresAt: soon.Add(time.Hour),
	}})
}

// scheduledInOrder checks that an iteration returns every event once, by due time, and that it can end early. Many
// events are due at the same time and have ids of different types.
func scheduledInOrder(t *testing.T, fixture Fixture) {
	want := map[event.ID]bool{}
	if err := fixture.Transaction(t.Context(), func(ctx context.Context) error {
		for i := range 20 {
			kinds := [][]event.Option{nil, {event.WithID(fmt.Sprint("text", i))}, {event.WithID(bson.NewObjectID())}}
			for _, opts := range kinds {
				id, err := fixture.Box.Schedule(ctx, soon.Add(time.Duration(i%3)*time.Second), newEvent("x", opts...))
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

	last := time.Time{}
	for _, e := range fixture.readScheduled(t, outbox.ScheduledQuery{}) {
		if !want[e.ID] || e.DueAt.Before(last) {
			t.Fatalf("event %s is repeated, unknown or out of order", e.ID)
		}
		delete(want, e.ID)
		last = e.DueAt
	}
	if len(want) != 0 {
		t.Errorf("%d events are missing", len(want))
	}

	seen := 0
	for _, err := range fixture.Box.Scheduled(t.Context(), outbox.ScheduledQuery{}) {
		if err != nil {
			t.Fatal(err)
		}
		if seen++; seen == 5 {
			break
		}
	}
	if seen != 5 {
		t.Errorf("%d rounds of a loop that ends after 5", seen)
	}
}

func cancelByQuery(t *testing.T, fixture Fixture) {
	ctx := t.Context()
	fixture.scheduleEvent(t, newEvent("keep"), soon)
	fixture.scheduleEvent(t, newEvent("drop"), soon)
	fixture.scheduleEvent(t, newEvent("drop"), soon)
	// This event is not scheduled, so it must stay.
	fixture.appendEvents(t, newEvent("drop"))

	if _, err := fixture.Box.CancelScheduled(ctx, outbox.ScheduledQuery{}); !errors.Is(err, outbox.ErrEmptyQuery) {
		t.Errorf("an empty query: %v", err)
	}

	no := errors.New("no")
	if err := fixture.Transaction(ctx, func(ctx context.Context) error {
		if n, err := fixture.Box.CancelScheduled(ctx, outbox.ScheduledQuery{All: true}); err != nil || n != 3 {
			t.Errorf("all events: canceled %d, want 3; %v", n, err)
		}
		return no
	}); !errors.Is(err, no) {
		t.Error(err)
	}

	if n, err := fixture.Box.CancelScheduled(ctx, outbox.ScheduledQuery{Name: "drop"}); err != nil || n != 2 {
		t.Errorf("by type: canceled %d, want 2; %v", n, err)
	}

	if n, err := fixture.Box.CancelScheduled(ctx, outbox.ScheduledQuery{All: true}); err != nil || n != 1 {
		t.Errorf("the rest: canceled %d, want 1; %v", n, err)
	}

	fixture.checkTypes(t, "drop")
}
