package admin_test

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/operate/admin"
	"github.com/outrelay/outrelay/internal/operate/admin/admintest"
	"github.com/outrelay/outrelay/internal/relay/stored/outboxes"
	"github.com/outrelay/outrelay/internal/relay/stored/waiting"
)

func (f *office) newWaiting(coll *mongo.Collection, id, reason string, key any, pos uint32, topics ...string) waiting.Entry {
	f.t.Helper()
	e := admintest.Waits(f.t, mongodb.Namespace(coll), append(letterOf(id, planted), bson.E{Key: "key", Value: key}), waiting.Reason(reason), topics...)
	e.Pos, e.Attempts = outboxes.PosAt(bson.Timestamp{T: pos}), 2
	return e
}

func (f *office) wait(list ...waiting.Entry) {
	f.t.Helper()
	admintest.StoreWaiting(f.t, f.state.Collection("waiting"), list...)
}

func (f *office) insert(coll *mongo.Collection, docs ...bson.D) {
	f.t.Helper()
	if _, err := coll.InsertMany(f.t.Context(), docs); err != nil {
		f.t.Fatal(err)
	}
}

func TestWaitingEnvelopesAreCounted(t *testing.T) {
	t.Parallel()
	f := openOffice(t)
	if got, err := f.op.Waiting().Summary(t.Context(), ""); err != nil || len(got) != 0 {
		t.Errorf("of nothing: %+v, %v", got, err)
	}

	foreign := f.newWaiting(f.a, "p1", "parked", "k", 20, "orders")
	foreign.Watcher = "other"
	f.wait(f.newWaiting(f.a, "p1", "parked", "k", 20, "orders", "audit"), f.newWaiting(f.a, "p2", "parked", "k", 10, "orders"),
		f.newWaiting(f.a, "r", "retry", "q", 30, "orders"), f.newWaiting(f.b, "q", "queued", "q", 30), foreign)
	due := time.UnixMilli(4_000_000_000_000).UTC()
	for i, coll := range []*mongo.Collection{f.a, f.b, f.b} {
		f.moveToDead(coll, record.Malformed, letterOf(fmt.Sprint("dead", i), planted))
		f.insert(coll, append(letterOf(fmt.Sprint("due", i), planted), bson.E{Key: "dueAt", Value: due.Add(time.Duration(i) * time.Hour)}),
			letterOf(fmt.Sprint("healthy", i), planted))
	}

	got, err := f.op.Waiting().Summary(t.Context(), "")
	if err != nil {
		t.Fatal(err)
	}

	var rows []string
	for _, g := range got {
		at := "-"
		if g.Oldest != nil {
			at = fmt.Sprint(g.Oldest.Unix())
		}
		rows = append(rows, fmt.Sprintf("%d %s %s %d %s", slices.Index([]string{mongodb.Namespace(f.a), mongodb.Namespace(f.b)}, g.Collection), g.Reason, g.Topic, g.Count, at))
	}

	slices.Sort(rows)
	want := []string{
		"0 parked audit 1 20", "0 parked orders 2 10", "0 retry orders 1 30", "0 scheduled  1 4000000000",
		"1 queued  1 30", "1 scheduled  2 4000003600",
	}
	if !slices.Equal(rows, want) {
		t.Errorf("counted %q, want %q", rows, want)
	}
	if got, err := f.op.Waiting().Summary(t.Context(), mongodb.Namespace(f.b)); err != nil || len(got) != 2 {
		t.Errorf("of one collection: %+v, %v", got, err)
	}
}

func TestWaitingEnvelopesAreListedInTheirOrder(t *testing.T) {
	t.Parallel()
	f := openOffice(t)
	// Another watcher reads the same outboxes, and the event of the same id waits for it too.
	foreign := f.newWaiting(f.a, "k1", "parked", "k", 10, "orders", "audit")
	foreign.Watcher = "other"
	f.wait(f.newWaiting(f.a, "k3", "blocked", "k", 30, "orders"), f.newWaiting(f.a, "k1", "parked", "k", 10, "orders", "audit"),
		f.newWaiting(f.a, "k2", "blocked", "k", 20, "audit"), foreign)
	many := []waiting.Entry{f.newWaiting(f.b, "n1", "retry", int32(42), 5, "orders")}
	for i := range 1200 { // more than a page
		many = append(many, f.newWaiting(f.b, fmt.Sprintf("x%04d", i), "parked", "x", uint32(100+i/3), "late")) // three of one position
	}

	f.wait(many...)
	for name, c := range map[string]struct {
		admin.WaitingFilter
		limit int
		want  []string
	}{
		"a key":        {admin.WaitingFilter{Key: "k"}, 100, []string{"k1", "k2", "k3"}},
		"a number":     {admin.WaitingFilter{Key: "42"}, 100, []string{"n1"}},
		"a topic":      {admin.WaitingFilter{Topic: "audit"}, 100, []string{"k1", "k2"}},
		"a reason":     {admin.WaitingFilter{Reason: "blocked"}, 100, []string{"k2", "k3"}},
		"a collection": {admin.WaitingFilter{Collection: mongodb.Namespace(f.a), Topic: "orders"}, 100, []string{"k1", "k3"}},
		"ids":          {admin.WaitingFilter{IDs: []string{"k3", "n1", "nobody"}}, 100, []string{"k3", "n1"}},
		"failed":       {admin.WaitingFilter{Failed: true}, 100, []string{"n1"}},
		"no such":      {admin.WaitingFilter{Key: "nobody"}, 100, nil},
	} {
		list, err := f.op.Waiting().List(t.Context(), c.WaitingFilter, c.limit, "")
		var ids []string
		for _, e := range list.Items {
			ids = append(ids, e.ID)
		}
		// The names of the databases are random.
		slices.Sort(ids)
		if err != nil || !slices.Equal(ids, c.want) {
			t.Errorf("%s: %v, %v; want %v", name, ids, err, c.want)
		}
	}

	list, err := f.op.Waiting().List(t.Context(), admin.WaitingFilter{}, 2*admin.MaxPage, "")
	if err != nil || len(list.Items) != admin.MaxPage || list.Total != 1204 {
		t.Errorf("%d of %d, %v", len(list.Items), list.Total, err)
	}

	// Within a key, the order is that of sending.
	inOrder, err := f.op.Waiting().List(t.Context(), admin.WaitingFilter{Key: "k"}, 10, "")
	if got := inOrder.Items; err != nil || len(got) != 3 || got[0].ID != "k1" || got[1].ID != "k2" || got[2].ID != "k3" {
		t.Errorf("%+v, %v", inOrder, err)
	}
	page, err := f.op.Waiting().List(t.Context(), admin.WaitingFilter{Key: "k"}, 1, "")
	if one := page.Items; err != nil || len(one) != 1 || page.Total != 3 || one[0].Reason != "parked" || !slices.Equal(one[0].Topics, []string{"audit", "orders"}) || one[0].Attempts != 2 || one[0].Origin != "stream" {
		t.Errorf("%+v, %v", page, err)
	}

	for _, f2 := range []admin.WaitingFilter{{Reason: "dead"}, {Collection: "a.b"}} {
		if _, err := f.op.Waiting().List(t.Context(), f2, 1, ""); err == nil {
			t.Errorf("%+v was taken", f2)
		}
	}
}

// A page continues exactly where the last page ended, also between envelopes of one position, and if envelopes are sent in between.
func TestPagesOfWaitingEnvelopesContainEachOnce(t *testing.T) {
	t.Parallel()
	f := openOffice(t)
	var list []waiting.Entry
	for i := range 60 {
		coll := []*mongo.Collection{f.a, f.b}[i%2]
		list = append(list, f.newWaiting(coll, fmt.Sprintf("x%02d", i), "parked", fmt.Sprint("k", i%4), uint32(100+i/20), "late"))
	}
	f.wait(list...)

	for _, size := range []int{1, 3, 7, 60} {
		seen, after := map[string]bool{}, ""
		for {
			page, err := f.op.Waiting().List(t.Context(), admin.WaitingFilter{Topic: "late"}, size, after)
			if err != nil || len(page.Items) > size {
				t.Fatalf("%d of %d, %v", len(page.Items), size, err)
			}
			for _, e := range page.Items {
				if seen[e.ID] {
					t.Errorf("pages of %d: %s twice", size, e.ID)
				}
				seen[e.ID] = true
			}
			if after = page.Next; after == "" {
				break
			}
		}
		if len(seen) != len(list) {
			t.Errorf("pages of %d have %d of %d", size, len(seen), len(list))
		}
	}
}

// An action on failed envelopes changes those of the filter, and none of another reason or of another watcher.
func TestFailedEnvelopesAreRetriedByAFilter(t *testing.T) {
	t.Parallel()
	f := openOffice(t)
	later := time.Now().Add(time.Hour)
	failed := func(coll *mongo.Collection, id, key string, topics ...string) waiting.Entry {
		e := f.newWaiting(coll, id, "retry", key, 10, topics...)
		e.NextAt = later
		e.Error = &record.Attempt{Class: "record_rejected", Reason: "87", Topic: "orders", At: time.Now(), Node: "n1"}
		return e
	}
	foreign := failed(f.a, "a1", "k", "orders")
	foreign.Watcher = "other"
	fresh := failed(f.a, "new", "k", "orders")
	fresh.Attempts, fresh.Error = 0, nil
	f.wait(failed(f.a, "a1", "k", "orders"), failed(f.a, "a2", "k", "audit"), failed(f.b, "b1", "q", "orders"), foreign, fresh,
		f.newWaiting(f.a, "blocked", "blocked", "k", 20, "orders"))

	list, err := f.op.Waiting().List(t.Context(), admin.WaitingFilter{Failed: true, Key: "k", Topic: "orders"}, 10, "")
	if got := list.Items; err != nil || len(got) != 1 || got[0].ID != "a1" || got[0].Error == nil || got[0].Error.Class != "record_rejected" || got[0].Error.Node != "n1" {
		t.Fatalf("%+v, %v", list, err)
	}
	due := func() (ids []string) {
		t.Helper()
		for _, w := range []string{"orders", "other"} {
			list, err := f.op.ForWatcher(w).Waiting().List(t.Context(), admin.WaitingFilter{}, 100, "")
			if err != nil {
				t.Fatal(err)
			}
			for _, e := range list.Items {
				if e.NextAt != nil && time.Until(*e.NextAt) < time.Minute {
					ids = append(ids, fmt.Sprintf("%s %s %d %v", w, e.ID, e.Attempts, e.Error != nil))
				}
			}
		}
		slices.Sort(ids)
		return ids
	}

	byKey := admin.WaitingFilter{Key: "k"}
	if got, err := f.op.Waiting().Retry(t.Context(), byKey, admin.ResetAttempts, admin.DryRun); err != nil || got.Failed != 2 || got.Done != 0 || len(due()) != 0 {
		t.Errorf("dry run: %+v, %v", got, err)
	}
	if got, err := f.op.Waiting().Retry(t.Context(), byKey, admin.ResetAttempts, admin.ForReal); err != nil || got.Done != 2 {
		t.Errorf("%+v, %v", got, err)
	}
	if got, want := due(), []string{"orders a1 0 false", "orders a2 0 false"}; !slices.Equal(got, want) {
		t.Errorf("due: %q, want %q", got, want)
	}
	// Their attempts are gone, so they are no failed ones any more.
	if got, err := f.op.Waiting().Retry(t.Context(), byKey, admin.ResetAttempts, admin.ForReal); err != nil || got.Failed != 0 || got.Done != 0 {
		t.Errorf("again: %+v, %v", got, err)
	}
	if got, err := f.op.Waiting().Retry(t.Context(), admin.WaitingFilter{IDs: []string{"b1", "blocked", "new", "nobody"}}, admin.KeepAttempts, admin.ForReal); err != nil || got.Done != 1 {
		t.Errorf("%+v, %v", got, err)
	}
	if got, want := due(), []string{"orders a1 0 false", "orders a2 0 false", "orders b1 2 true"}; !slices.Equal(got, want) {
		t.Errorf("due: %q, want %q", got, want)
	}
	if _, err := f.op.Waiting().Retry(t.Context(), admin.WaitingFilter{Reason: "parked"}, admin.KeepAttempts, admin.ForReal); err == nil {
		t.Error("envelopes that have not failed were retried")
	}

	if _, err := f.op.Waiting().Retry(t.Context(), admin.WaitingFilter{}, admin.ResetAttempts, admin.ForReal); !errors.Is(err, admin.ErrNoCondition) {
		t.Errorf("without a condition: got %v, want %v", err, admin.ErrNoCondition)
	}
	if got, err := f.op.Waiting().Retry(t.Context(), admin.WaitingFilter{All: true}, admin.ResetAttempts, admin.DryRun); err != nil || got.Failed != 1 {
		t.Errorf("all: %+v, %v", got, err)
	}

	log := f.readLog()
	if len(log) != 2 || log[1].Kind != "failed_reset" || log[1].Fields.Lookup("count").AsInt64() != 2 || log[0].Kind != "failed_retried" {
		t.Errorf("%+v", log)
	}
}

// What waits of a dropped outbox is listed by its name, although the watcher does not read the outbox any more.
func TestWhatWaitsOfADroppedOutboxIsListed(t *testing.T) {
	t.Parallel()
	f := openOffice(t)
	e := admintest.Waits(t, "gone.outbox", letterOf("x", planted), waiting.Parked, "orders")
	f.wait(e)
	page, err := f.op.Waiting().List(t.Context(), admin.WaitingFilter{Collection: "gone.outbox"}, 0, "")
	if err != nil || page.Total != 1 || len(page.Items) != 1 {
		t.Errorf("%+v, %v", page, err)
	}
	if groups, err := f.op.Waiting().Summary(t.Context(), "gone.outbox"); err != nil || len(groups) != 1 {
		t.Errorf("%+v, %v", groups, err)
	}
}

// Each waiting event states in words why it waits. Of a parked one, it is the owner's reason of its topic.
func TestWaitingEventsStateWhyTheyWait(t *testing.T) {
	t.Parallel()
	f := openOffice(t)
	f.insertWaiting(f.a, "1", "parked", "k1", "missing")
	f.insertWaiting(f.a, "2", "blocked", "k1", "missing")
	f.insertWaiting(f.a, "3", "parked", "k2", "writable again")
	f.insertWaiting(f.a, "4", "queued", "k3", "orders")
	topic := bson.D{{Key: "topic", Value: "missing"}, {Key: "reason", Value: "topic \"missing\" does not exist"}, {Key: "since", Value: time.Now()}, {Key: "parked", Value: true}}
	stats := bson.D{{Key: "at", Value: time.Now()}, {Key: "unwritable", Value: bson.A{topic}}}
	if _, err := f.state.Collection("watchers").UpdateByID(t.Context(), "orders/0of1", bson.D{{Key: "$set", Value: bson.D{{Key: "stats", Value: stats}}}}); err != nil {
		t.Fatal(err)
	}

	list, err := f.newDesk().Waiting().List(t.Context(), admin.WaitingFilter{}, 10, "")
	if err != nil || len(list.Items) != 4 {
		t.Fatalf("%+v, %v", list, err)
	}
	for _, e := range list.Items {
		want := map[string]string{
			"1": `topic "missing" does not exist`, "2": "an earlier event of the key waits", "3": "the topic could not be written", "4": "it is sent next",
		}[e.ID]
		if !strings.HasPrefix(e.Why, want) {
			t.Errorf("%s: %q, want %q", e.ID, e.Why, want)
		}
	}
}
