package admin_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/operate/admin"
	"github.com/outrelay/outrelay/internal/service/setaside"
)

// setAside stores a message of a handler in the database of an outbox. failed is the number of its attempts.
func (f *office) setAside(outbox *mongo.Collection, handler, key string, offset int64, failed int) {
	f.t.Helper()
	store := setaside.New(outbox.Database(), setaside.DefaultCollection)
	if err := store.EnsureIndexes(f.t.Context()); err != nil {
		f.t.Fatal(err)
	}

	place := setaside.Place{Handler: handler, Topic: "orders", Partition: 1}
	message := &setaside.Message{
		ID: setaside.MessageID(place, 0, offset, ""), Place: place, Queue: setaside.KeyQueue([]byte(key)), Offset: offset,
		Key: []byte(key), Value: []byte(planted), Headers: []setaside.Header{
			{Key: "id", Value: fmt.Append(nil, "m", offset)}, {Key: "type", Value: []byte("OrderPlaced")}, {Key: "secret", Value: []byte(planted)},
		},
	}
	if failed > 0 {
		message.Failed, message.Elapsed = failed, time.Hour
		message.History = []setaside.Failure{{At: time.Now(), Attempt: failed, Class: "handler", Reason: "no response"}}
	}
	if err := store.Add(f.t.Context(), time.Hour, message); err != nil {
		f.t.Fatal(err)
	}
}

func TestMessagesThatHandlersRetryAreListedPageByPage(t *testing.T) {
	t.Parallel()
	f := openWard(t)
	const messages = 9
	for n := range int64(messages) {
		outbox := []*mongo.Collection{f.a, f.b}[n%2]
		// The later messages of a key are untried.
		f.setAside(outbox, fmt.Sprint("g/h", n%3), fmt.Sprint("key", n%4), n, max(0, 4-int(n)))
	}

	seen := map[string]bool{}
	after, last := "", ""
	for pages := 0; ; pages++ {
		page, err := f.op.HandlerWaiting().List(t.Context(), admin.HandlerWaitingFilter{}, 2, after)
		if err != nil || page.Total != messages || pages > messages {
			t.Fatalf("page %d: %+v, %v", pages, page, err)
		}
		for _, m := range page.Items {
			if seen[m.Place] {
				t.Errorf("%s is on two pages", m.Place)
			}
			seen[m.Place] = true
			if order := m.Database + m.Handler; order < last {
				t.Errorf("%s after %s", order, last)
			} else {
				last = order
			}
			if m.Group != "g" || m.Type != "OrderPlaced" || m.ID != "m"+strings.TrimPrefix(m.Place, "orders/1@") || m.AsideAt.IsZero() {
				t.Errorf("unexpected message %+v", m)
			}
			if failed := m.Attempts > 0; failed != (m.NextAt != nil) || failed != (m.Reason == "no response") || failed != (m.FailedAt != nil) {
				t.Errorf("unexpected attempts %+v", m)
			}
		}
		if after = page.Next; after == "" {
			break
		}
	}
	if len(seen) != messages {
		t.Errorf("messages of all pages: got %d, want %d", len(seen), messages)
	}

	for name, c := range map[string]struct {
		filter admin.HandlerWaitingFilter
		want   int64
	}{
		"group":          {admin.HandlerWaitingFilter{Group: "g"}, messages},
		"another group":  {admin.HandlerWaitingFilter{Group: "gg"}, 0},
		"handler":        {admin.HandlerWaitingFilter{Handler: "h1"}, 3},
		"both":           {admin.HandlerWaitingFilter{Group: "g", Handler: "h1"}, 3},
		"key":            {admin.HandlerWaitingFilter{Key: "key1"}, 2},
		"topic":          {admin.HandlerWaitingFilter{Topic: "orders"}, messages},
		"reason":         {admin.HandlerWaitingFilter{Reason: "no resp"}, 4},
		"another reason": {admin.HandlerWaitingFilter{Reason: "response"}, 0},
		"an id":          {admin.HandlerWaitingFilter{IDs: []string{"m3"}}, 1},
		"places":         {admin.HandlerWaitingFilter{IDs: []string{"orders/1@3", "orders/1@4", "orders/0@5"}}, 2},
		"database":       {admin.HandlerWaitingFilter{Database: f.a.Database().Name()}, 5},
	} {
		page, err := f.op.HandlerWaiting().List(t.Context(), c.filter, 0, "")
		if err != nil || page.Total != c.want || int64(len(page.Items)) != c.want {
			t.Errorf("%s: got %d of %d (%v), want %d", name, len(page.Items), page.Total, err, c.want)
		}
	}
	groups, err := f.op.HandlerWaiting().Summary(t.Context(), admin.HandlerWaitingFilter{})
	if err != nil || len(groups) != 6 || groups[0].FailedAt == nil || groups[0].Failed == 0 {
		t.Errorf("summary: %+v, %v", groups, err)
	}
	if view, err := f.op.Overview(t.Context()); err != nil || view.Counts.HandlerWaiting != messages {
		t.Errorf("overview: got %d (%v), want %d", view.Counts.HandlerWaiting, err, messages)
	}
}

func TestActionsOnMessagesThatHandlersRetry(t *testing.T) {
	t.Parallel()
	f := openWard(t)
	for n := range int64(4) {
		f.setAside(f.a, "g/h", "k", n, max(0, 2-int(n)))
	}
	desk := f.op.HandlerWaiting()

	if out, err := desk.Retry(t.Context(), admin.HandlerWaitingFilter{Handler: "h"}, admin.DryRun); err != nil || out.Matched != 4 || out.Retried != 2 {
		t.Errorf("dry run of a retry: %+v, %v", out, err)
	}
	if n := len(f.readLog()); n != 0 {
		t.Errorf("a dry run wrote %d entries", n)
	}
	if out, err := desk.Retry(t.Context(), admin.HandlerWaitingFilter{Handler: "h"}, admin.ForReal); err != nil || out.Retried != 2 {
		t.Errorf("retry: %+v, %v", out, err)
	}
	if out, err := desk.Discard(t.Context(), admin.HandlerWaitingFilter{IDs: []string{"orders/1@0"}}, admin.ForReal); err != nil || out.Discarded != 1 {
		t.Errorf("discard: %+v, %v", out, err)
	}

	page, err := desk.List(t.Context(), admin.HandlerWaitingFilter{}, 0, "")
	if err != nil || len(page.Items) != 4 {
		t.Fatalf("list: %+v, %v", page, err)
	}
	for i, m := range page.Items {
		if (m.RequestedAt != nil) != (i < 2) || (m.DiscardedBy == "ann") != (i == 0) {
			t.Errorf("message %d: %+v", i, m)
		}
	}

	var kinds []string
	for _, e := range f.readLog() {
		kinds = append(kinds, string(e.Kind))
	}
	if got := strings.Join(kinds, " "); !strings.Contains(got, "handler_retried") || !strings.Contains(got, "handler_discarded") {
		t.Errorf("audit log: %s", got)
	}

	for name, filter := range map[string]admin.HandlerWaitingFilter{
		"no condition": {}, "a database": {Database: "none", All: true}, "an empty id": {IDs: []string{""}}, "a slash": {Handler: "g/h"},
	} {
		_, err := desk.Discard(t.Context(), filter, admin.ForReal)
		if kind, _ := admin.Explain(err); err == nil || kind != admin.FailInvalid {
			t.Errorf("%s: got %v (%s)", name, err, kind)
		}
	}
	if _, err := desk.Retry(t.Context(), admin.HandlerWaitingFilter{}, admin.DryRun); !errors.Is(err, admin.ErrNoCondition) {
		t.Errorf("without a condition: %v", err)
	}
}
