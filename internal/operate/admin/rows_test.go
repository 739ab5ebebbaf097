package admin_test

import (
	"slices"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/operate/admin"
	"github.com/outrelay/outrelay/pkg/consumer/deadletter"
)

// rowsOf returns the rows of a list, and fails unless there are n different ones.
func rowsOf[T any](t *testing.T, n int, page admin.Page[T], err error, row func(T) string) []string {
	t.Helper()
	var rows []string
	for _, item := range page.Items {
		rows = append(rows, row(item))
	}
	different := slices.Compact(slices.Sorted(slices.Values(rows)))
	if err != nil || len(rows) != n || len(different) != n || slices.Contains(rows, "") {
		t.Fatalf("rows %q, %v, want %d different ones", rows, err, n)
	}
	return rows
}

// Ids are unique in one outbox, handler or delivery alone. A row of a list names one entry, and an action with it changes no other one.
func TestAnActionWithARowChangesThisEntryAlone(t *testing.T) {
	t.Parallel()
	f := openWard(t)

	t.Run("scheduled", func(t *testing.T) {
		for _, coll := range []*mongo.Collection{f.a, f.b} {
			f.insert(coll, append(letterOf("invoice-1", "p"), bson.E{Key: "dueAt", Value: time.Now().Add(time.Hour)}))
		}
		list := func(n int) []string {
			page, err := f.op.Schedule().List(t.Context(), admin.ScheduledFilter{}, 0, "")
			return rowsOf(t, n, page, err, func(e admin.Scheduled) string { return e.Row })
		}
		rows := list(2)
		if out, err := f.op.Schedule().Cancel(t.Context(), admin.ScheduledFilter{IDs: rows[:1]}, nil); out.Cancelled != 1 || err != nil {
			t.Errorf("%+v, %v, want 1", out, err)
		}
		if left := list(1); left[0] != rows[1] {
			t.Errorf("%s is left, want %s", left[0], rows[1])
		}
	})

	t.Run("waiting", func(t *testing.T) {
		again := f.newWaiting(f.a, "w", "retry", "k", 10, "orders")
		again.Delivery = 1
		f.wait(f.newWaiting(f.a, "w", "retry", "k", 10, "orders"), f.newWaiting(f.b, "w", "retry", "k", 10, "orders"), again)
		page, err := f.op.Waiting().List(t.Context(), admin.WaitingFilter{}, 0, "")
		rows := rowsOf(t, 3, page, err, func(e admin.WaitingEnvelope) string { return e.Row })
		if out, err := f.op.Waiting().Retry(t.Context(), admin.WaitingFilter{IDs: rows[:1]}, admin.ResetAttempts, admin.ForReal); out.Done != 1 || err != nil {
			t.Errorf("%+v, %v, want 1", out, err)
		}
		if out, err := f.op.Waiting().Retry(t.Context(), admin.WaitingFilter{IDs: []string{rows[0], "w"}}, admin.ResetAttempts, admin.DryRun); out.Failed != 2 || err != nil {
			t.Errorf("with a row and an id: %+v, %v, want the 2 others", out, err)
		}
	})

	t.Run("messages of handlers", func(t *testing.T) {
		f.setAside(f.a, "g/mail", "k", 7, 1)
		f.setAside(f.a, "g/billing", "k", 7, 1)
		f.setAside(f.b, "g/billing", "k", 7, 1)
		desk := f.op.HandlerWaiting()
		page, err := desk.List(t.Context(), admin.HandlerWaitingFilter{}, 0, "")
		rows := rowsOf(t, 3, page, err, func(m admin.HandlerMessage) string { return m.Row })
		if out, err := desk.Discard(t.Context(), admin.HandlerWaitingFilter{IDs: rows[:1]}, admin.ForReal); out.Matched != 1 || out.Discarded != 1 || err != nil {
			t.Errorf("%+v, %v, want 1", out, err)
		}
	})

	t.Run("letters of handlers", func(t *testing.T) {
		for _, handler := range []string{"mail", "billing"} {
			f.giveUp(f.a, deadletter.DefaultCollection, handler, "m")
			f.giveUp(f.a, "billing_dead", handler, "m")
		}
		f.giveUp(f.b, deadletter.DefaultCollection, "billing", "m")
		desk := f.op.Letters()
		page, err := desk.List(t.Context(), ofHandlers, 0, "")
		rows := rowsOf(t, 5, page, err, func(l admin.DeadLetter) string { return l.Row })
		for i, row := range rows {
			letter, err := desk.Show(t.Context(), admin.DeadRef{ID: row, Delivery: -1}, admin.WithoutPayload)
			if want := page.Items[i]; err != nil || letter.Row != row || letter.Collection != want.Collection || letter.Source != want.Source {
				t.Errorf("row %s: %+v, %v", row, letter, err)
			}
		}
		if out, err := desk.Requeue(t.Context(), admin.DeadFilter{IDs: rows[:1]}, admin.DeadOptions{DryRun: true}, nil); out.Matched != 1 || err != nil {
			t.Errorf("requeue: %+v, %v, want 1", out, err)
		}
		if out, err := desk.Discard(t.Context(), admin.DeadFilter{IDs: rows[:2]}, admin.ForReal, nil); out.Discarded != 2 || err != nil {
			t.Errorf("discard: %+v, %v, want 2", out, err)
		}
		if n, err := desk.Count(t.Context(), admin.DeadFilter{IDs: []string{rows[2], "m"}}); n != 3 || err != nil {
			t.Errorf("with a row and an id: %d, %v, want 3", n, err)
		}
	})
}
