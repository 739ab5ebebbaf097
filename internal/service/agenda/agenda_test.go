package agenda_test

import (
	"context"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.mongodb.org/mongo-driver/v2/bson"
	driverevent "go.mongodb.org/mongo-driver/v2/event"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
	"go.uber.org/goleak"

	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/service/agenda"
	"github.com/outrelay/outrelay/pkg/event"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(stacktest.Settled(m, goleak.Find)) }

// soon is the due time of the events, far in the future.
var soon = time.UnixMilli(1_900_000_000_123).UTC()

// schedule inserts an event and returns its id.
func schedule(t *testing.T, coll *mongo.Collection, name string, at time.Time, opts ...event.Option) event.ID {
	t.Helper()
	e := event.New(event.Aggregate{Type: "order", ID: "o-1"}, name, event.Payload{}, opts...).With(event.WithDueAt(at))
	if _, err := coll.InsertOne(t.Context(), e); err != nil {
		t.Fatal(err)
	}
	return e.ID()
}

// Every event is on exactly one page. Many events are due at the same time and have ids of different types.
func TestPagesContainEveryEventOnce(t *testing.T) {
	t.Parallel()
	coll := stacktest.Database(t, stacktest.Client(t)).Collection("outbox")
	want := map[event.ID]bool{}
	for i := range 20 {
		at := soon.Add(time.Duration(i%3) * time.Second)
		want[schedule(t, coll, "x", at)] = true
		want[schedule(t, coll, "x", at, event.WithID(fmt.Sprint("text", i)))] = true
		want[schedule(t, coll, "x", at, event.WithID(bson.NewObjectID()))] = true
	}

	if n, err := agenda.Count(t.Context(), coll, agenda.Query{}); n != 60 || err != nil {
		t.Errorf("counted %d events, want 60: %v", n, err)
	}

	for _, size := range []int{1, 7, 59, 60, 61} {
		seen := map[event.ID]bool{}
		last := time.Time{}
		after := ""
		pages := 0
		for first := true; first || after != ""; first = false {
			page, err := agenda.ReadPage(t.Context(), coll, agenda.Query{}, size, after)
			if err != nil {
				t.Fatal(err)
			}

			pages++
			if len(page.Events) > size {
				t.Fatalf("a page has %d events, want at most %d", len(page.Events), size)
			}

			for _, e := range page.Events {
				if seen[e.ID] || !want[e.ID] || e.DueAt.Before(last) {
					t.Fatalf("event %s is repeated, unknown or out of order", e.ID)
				}
				seen[e.ID] = true
				last = e.DueAt
			}
			after = page.Next
		}

		if len(seen) != 60 || pages != (59+size)/size {
			t.Errorf("with pages of %d: got %d events on %d pages, want 60 on %d", size, len(seen), pages, (59+size)/size)
		}
	}
}

func TestPagesRejectBadArguments(t *testing.T) {
	t.Parallel()
	coll := stacktest.Client(t).Database("x").Collection("outbox")
	for name, c := range map[string]struct {
		q     agenda.Query
		size  int
		after string
	}{
		"no events":          {size: 0},
		"too many events":    {size: 10_001},
		"no position":        {size: 1, after: "x"},
		"not even an ending": {size: 1, after: "!"},
		"a zero id":          {q: agenda.Query{IDs: []event.ID{{}}}, size: 1},
	} {
		if _, err := agenda.ReadPage(t.Context(), coll, c.q, c.size, c.after); err == nil {
			t.Errorf("%s was accepted", name)
		}
	}
}

func TestSummaryCountsByName(t *testing.T) {
	t.Parallel()
	coll := stacktest.Database(t, stacktest.Client(t)).Collection("outbox")
	for i := range 5 {
		schedule(t, coll, []string{"a", "b"}[i%2], soon.Add(time.Duration(i)*time.Second))
	}

	got, err := agenda.Summarize(t.Context(), coll, agenda.Query{})
	if err != nil {
		t.Fatal(err)
	}

	for i := range got {
		got[i].Earliest = got[i].Earliest.UTC()
		got[i].Latest = got[i].Latest.UTC()
	}
	want := []agenda.Summary{
		{Name: "a", Count: 3, Earliest: soon, Latest: soon.Add(4 * time.Second)},
		{Name: "b", Count: 2, Earliest: soon.Add(time.Second), Latest: soon.Add(3 * time.Second)},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}

// An operator's action reports its progress, and changes every event once, also those that move to a place before it.
func TestActionsInParts(t *testing.T) {
	t.Parallel()
	coll := stacktest.Database(t, stacktest.Client(t)).Collection("outbox")
	if _, err := coll.Indexes().CreateOne(t.Context(), mongo.IndexModel{Keys: bson.D{{Key: "dueAt", Value: 1}}}); err != nil {
		t.Fatal(err)
	}
	list := make([]any, 2500)
	for i := range list {
		list[i] = event.New(event.Aggregate{Type: "order", ID: "o-1"}, "x", event.Payload{}, event.WithDueAt(soon.Add(time.Duration(i)*time.Second)))
	}
	if _, err := coll.InsertMany(t.Context(), list); err != nil {
		t.Fatal(err)
	}

	for name, to := range map[string]time.Time{"sooner": soon.Add(-time.Hour), "later": soon.Add(100 * time.Hour)} {
		for _, want := range [][]int64{{1000, 2000, 2500}, nil} {
			var progress []int64
			n, err := agenda.MoveInParts(t.Context(), coll, agenda.Query{Name: "x"}, to, agenda.Report{Did: func(n int64) { progress = append(progress, n) }})
			if diff := cmp.Diff(want, progress); err != nil || diff != "" {
				t.Errorf("%s: got %d, %v, progress:\n%s", name, n, err, diff)
			}
		}
		if n, err := agenda.Count(t.Context(), coll, agenda.Query{From: to, Before: to.Add(time.Millisecond)}); n != 2500 || err != nil {
			t.Errorf("%s: %d events have the new time, %v", name, n, err)
		}
	}

	if n, err := agenda.CancelInParts(t.Context(), coll, agenda.Query{Name: "x"}, agenda.Report{}); n != 2500 || err != nil {
		t.Errorf("canceled %d, %v", n, err)
	}
}

// Of named events, an action reports each that a watcher has claimed after the action has found it.
func TestAnActionReportsANamedEventThatIsGone(t *testing.T) {
	t.Parallel()
	coll := stacktest.Database(t, stacktest.Client(t)).Collection("outbox")
	query := agenda.Query{}
	for range 3 {
		scheduled := event.New(event.Aggregate{Type: "order", ID: "o-1"}, "x", event.Payload{}, event.WithDueAt(soon))
		if _, err := coll.InsertOne(t.Context(), scheduled); err != nil {
			t.Fatal(err)
		}
		query.IDs = append(query.IDs, scheduled.ID())
	}

	var missed []event.ID
	report := agenda.Report{Missed: func(id event.ID) { missed = append(missed, id) }}
	// All events are found before the first is canceled. Then a watcher claims the other two.
	report.Did = func(int64) {
		if _, err := coll.DeleteMany(t.Context(), bson.D{}); err != nil {
			t.Error(err)
		}
	}
	if n, err := agenda.CancelInParts(t.Context(), coll, query, report); n != 1 || err != nil || len(missed) != 2 || missed[0] == missed[1] {
		t.Errorf("%d canceled, %v, missed %v, want 1 and 2 missed ones", n, err, missed)
	}
}

// An operator may name thousands of events, each of which is changed alone.
func TestAStatementContainsOnlyTheIDsOfItsPart(t *testing.T) {
	t.Parallel()
	var largest atomic.Int64
	monitor := &driverevent.CommandMonitor{Started: func(_ context.Context, started *driverevent.CommandStartedEvent) {
		if started.CommandName == "delete" {
			largest.Store(max(largest.Load(), int64(len(started.Command))))
		}
	}}
	coll := stacktest.Database(t, stacktest.Client(t, options.Client().SetMonitor(monitor))).Collection("outbox")

	query := agenda.Query{}
	for range 200 {
		scheduled := event.New(event.Aggregate{Type: "order", ID: "o-1"}, "x", event.Payload{}, event.WithDueAt(soon))
		if _, err := coll.InsertOne(t.Context(), scheduled); err != nil {
			t.Fatal(err)
		}
		query.IDs = append(query.IDs, scheduled.ID())
	}
	n, err := agenda.CancelInParts(t.Context(), coll, query, agenda.Report{Missed: func(event.ID) {}})
	if err != nil || n != 200 || largest.Load() > 1000 {
		t.Errorf("%d canceled, %v; the largest statement has %d bytes", n, err, largest.Load())
	}
}

// A list that contains a due time is none: its envelope is a dead letter.
func TestAListOfDueTimesIsNotScheduled(t *testing.T) {
	t.Parallel()
	coll := stacktest.Database(t, stacktest.Client(t)).Collection("outbox")
	good := schedule(t, coll, "x", soon)
	for id, dueAt := range map[string]any{"list": bson.A{soon}, "lists": bson.A{soon, soon.Add(time.Hour)}, "text": "2030"} {
		if _, err := coll.InsertOne(t.Context(), bson.D{{Key: "_id", Value: id}, {Key: "type", Value: "x"}, {Key: "dueAt", Value: dueAt}}); err != nil {
			t.Fatal(err)
		}
	}

	for _, query := range []agenda.Query{{}, {From: soon}, {Before: soon.Add(time.Minute)}} {
		page, err := agenda.ReadPage(t.Context(), coll, query, 10, "")
		if err != nil || len(page.Events) != 1 || page.Events[0].ID != good {
			t.Errorf("%+v: %+v, %v", query, page, err)
		}
		list, err := agenda.Summarize(t.Context(), coll, query)
		if err != nil || len(list) != 1 || list[0].Count != 1 || !list[0].Latest.Equal(soon) {
			t.Errorf("%+v: %+v, %v", query, list, err)
		}
	}

	if moved, err := agenda.Move(t.Context(), coll, event.NewID("list"), soon); moved || err != nil {
		t.Errorf("the list was moved: %v", err)
	}
	if canceled, err := agenda.Cancel(t.Context(), coll, event.NewID("lists")); canceled || err != nil {
		t.Errorf("the list was canceled: %v", err)
	}
	if n, err := agenda.MoveInParts(t.Context(), coll, agenda.Query{}, soon.Add(time.Second), agenda.Report{}); n != 1 || err != nil {
		t.Errorf("%d were moved, %v", n, err)
	}
}
