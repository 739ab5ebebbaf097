package outbox_test

import (
	"bytes"
	"context"
	"errors"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo/writeconcern"

	"github.com/outrelay/outrelay/internal/contract/envelope"
	"github.com/outrelay/outrelay/pkg/event"
	"github.com/outrelay/outrelay/pkg/outbox"
)

func (b bundle) schedule(t *testing.T, at time.Time) event.ID {
	t.Helper()
	var id event.ID
	if err := b.box.Transaction(t.Context(), func(ctx context.Context) (err error) {
		id, err = b.box.Schedule(ctx, at, newEvent("later"))
		return err
	}); err != nil {
		t.Fatal(err)
	}
	return id
}

func (b bundle) dueAt(t *testing.T, id event.ID) time.Time {
	t.Helper()
	raw, err := b.coll.FindOne(t.Context(), bson.D{{Key: "_id", Value: id}}).Raw()
	if err != nil {
		t.Fatal(err)
	}

	var v envelope.View
	if err := envelope.Parse(raw, &v); err != nil || !v.HasDueAt || v.TS.IsZero() {
		t.Fatalf("%s: %v", raw, err)
	}

	return time.UnixMilli(v.DueAt)
}

func TestScheduleRescheduleCancel(t *testing.T) {
	t.Parallel()
	w := new(watch)
	b, ctx := setup(t, w.options().SetWriteConcern(writeconcern.W1())), t.Context()
	at := time.UnixMilli(1_900_000_000_123)
	id := b.schedule(t, at)
	if got := b.dueAt(t, id); !got.Equal(at) {
		t.Errorf("due at %s, want %s", got, at)
	}

	if err := b.box.Reschedule(ctx, id, at.Add(time.Hour)); err != nil {
		t.Fatal(err)
	}

	if got := b.dueAt(t, id); !got.Equal(at.Add(time.Hour)) {
		t.Errorf("rescheduled to %s", got)
	}

	no := errors.New("no")
	if err := b.box.Transaction(ctx, func(ctx context.Context) error {
		if err := b.box.Cancel(ctx, id); err != nil {
			t.Error(err)
		}
		return no
	}); !errors.Is(err, no) {
		t.Error(err)
	}

	// The cancellation was rolled back.
	b.checkTypes(t, "later")
	if err := b.box.Cancel(ctx, id); err != nil {
		t.Fatal(err)
	}

	b.checkTypes(t)
	for _, name := range []string{"delete", "update"} {
		if got := w.lastCommand(t, name).Lookup("writeConcern", "w").StringValue(); got != "majority" {
			t.Errorf("%s of a w:1 client has w %q", name, got)
		}
	}

	if err := b.box.Cancel(ctx, id); !errors.Is(err, outbox.ErrNotScheduled) {
		t.Errorf("cancelled twice: %v", err)
	}

	if _, err := b.box.Schedule(ctx, at, newEvent("x")); !errors.Is(err, outbox.ErrNoTransaction) {
		t.Errorf("without a transaction: %v", err)
	}
}

// After a watcher has claimed the event, a record may be in Kafka, so it is too late to cancel. A claim that keeps the event for its
// mark renames the due time. Fields of the service with other meanings do not matter.
func TestN19_CancelAndRescheduleMatchOnlyScheduled(t *testing.T) {
	t.Parallel()
	b, ctx := setup(t), t.Context()
	at := time.UnixMilli(1_900_000_000_000)
	for name, update := range map[string]bson.D{
		"claimed and marked": {{Key: "$rename", Value: bson.D{{Key: "dueAt", Value: "scheduledFor"}}}},
		"not scheduled":      {{Key: "$unset", Value: bson.D{{Key: "dueAt", Value: ""}}}},
		"null":               {{Key: "$set", Value: bson.D{{Key: "dueAt", Value: nil}}}},
		"no date":            {{Key: "$set", Value: bson.D{{Key: "dueAt", Value: "later"}}}},
	} {
		id := b.schedule(t, at)
		if _, err := b.coll.UpdateOne(ctx, bson.D{{Key: "_id", Value: id}}, update); err != nil {
			t.Fatal(err)
		}
		before, err := b.coll.FindOne(ctx, bson.D{{Key: "_id", Value: id}}).Raw()
		if err != nil {
			t.Fatal(err)
		}

		if err := b.box.Cancel(ctx, id); !errors.Is(err, outbox.ErrNotScheduled) {
			t.Errorf("%s: Cancel: %v", name, err)
		}
		if err := b.box.Reschedule(ctx, id, at.Add(time.Hour)); !errors.Is(err, outbox.ErrNotScheduled) {
			t.Errorf("%s: Reschedule: %v", name, err)
		}
		after, err := b.coll.FindOne(ctx, bson.D{{Key: "_id", Value: id}}).Raw()
		if err != nil || !bytes.Equal(before, after) {
			t.Errorf("%s: %s was %s, %v", name, after, before, err)
		}
	}

	own := bson.D{{Key: "$set", Value: bson.D{{Key: "state", Value: "retry"}, {Key: "claim", Value: "c-1"}, {Key: "nextAt", Value: at}}}}
	id := b.schedule(t, at)
	if _, err := b.coll.UpdateOne(ctx, bson.D{{Key: "_id", Value: id}}, own); err != nil {
		t.Fatal(err)
	}
	if err := b.box.Reschedule(ctx, id, at.Add(time.Hour)); err != nil || !b.dueAt(t, id).Equal(at.Add(time.Hour)) {
		t.Errorf("Reschedule of an event with fields of the service: %v, it is due at %s", err, b.dueAt(t, id))
	}
	if err := b.box.Cancel(ctx, id); err != nil {
		t.Errorf("Cancel of an event with fields of the service: %v", err)
	}
}

func TestScheduleRejectsNonsense(t *testing.T) {
	t.Parallel()
	b, ctx := setup(t), t.Context()
	if err := b.box.Cancel(ctx, event.ID{}); err == nil {
		t.Error("a zero id was accepted")
	}

	if err := b.box.Reschedule(ctx, event.NewID("x"), time.Time{}); err == nil || errors.Is(err, outbox.ErrNotScheduled) {
		t.Errorf("the zero time: %v", err)
	}

	if err := b.box.Transaction(ctx, func(ctx context.Context) error {
		_, err := b.box.Schedule(ctx, time.Time{}, newEvent("x"))
		return err
	}); !errors.Is(err, event.ErrInvalid) {
		t.Errorf("the zero time: %v", err)
	}
}

// Scheduled reads the next page when the loop has used up the previous one, so the loop may change the events that
// it has read.
func TestScheduledReadsPageByPage(t *testing.T) {
	t.Parallel()
	w := new(watch)
	b, ctx := setup(t, w.options()), t.Context()
	at := time.UnixMilli(1_900_000_000_000)
	events := make([]event.Event, 2100)
	for i := range events {
		events[i] = newEvent("later", event.WithDueAt(at.Add(time.Duration(i/2)*time.Millisecond)))
	}
	if err := b.newBox(t, outbox.WithoutTransaction()).Append(ctx, events...); err != nil {
		t.Fatal(err)
	}

	seen := map[event.ID]bool{}
	for e, err := range b.box.Scheduled(ctx, outbox.ScheduledQuery{}) {
		if err != nil {
			t.Fatal(err)
		}
		if len(seen) == 0 {
			if n, err := b.box.CancelScheduled(ctx, outbox.ScheduledQuery{From: at.Add(time.Second)}); n != 100 || err != nil {
				t.Fatalf("canceled %d of the last 100 events: %v", n, err)
			}
		}
		seen[e.ID] = true
	}
	if len(seen) != 2000 {
		t.Errorf("%d events, want 2000", len(seen))
	}

	// Each page reads its bound, and its events.
	w.checkCommands(t, map[string]int{"aggregate": 4})
}
