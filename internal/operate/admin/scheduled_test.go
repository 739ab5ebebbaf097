package admin_test

import (
	"errors"
	"slices"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/lab/statetest"
	"github.com/outrelay/outrelay/internal/operate/admin"
	"github.com/outrelay/outrelay/internal/relay/stored/nodes"
	"github.com/outrelay/outrelay/internal/relay/stored/outboxes"
	"github.com/outrelay/outrelay/pkg/event"
	"github.com/outrelay/outrelay/pkg/outbox"
)

// dueShop is an operator of a watcher with two outboxes, and what schedules an event in one of them.
func dueShop(t *testing.T) (o admin.Operator, dbs []*mongo.Database, schedule func(db int, typ string, in time.Duration) string) {
	t.Helper()
	client := stacktest.Client(t)
	o = admin.Operator{State: statetest.New(t, client), Watcher: "orders", Actor: "ann"}
	r := outboxes.NewRegistry(o.State.Collection("collections"))
	var boxes []*outbox.Box
	for i := range 2 {
		db := stacktest.Database(t, client)
		if _, err := r.Register(t.Context(), [16]byte{byte(i + 1)}, db.Name()+".outbox", "orders", bson.Timestamp{}); err != nil {
			t.Fatal(err)
		}
		box, err := outbox.New(db, outbox.WithoutTransaction())
		if err != nil {
			t.Fatal(err)
		}
		dbs, boxes = append(dbs, db), append(boxes, box)
	}

	return o, dbs, func(db int, typ string, in time.Duration) string {
		t.Helper()
		id, err := boxes[db].Schedule(t.Context(), time.Now().Add(in), event.New(event.Aggregate{Type: "order", ID: "o-1"}, typ, event.Bytes("", []byte("p"))))
		if err != nil {
			t.Fatal(err)
		}
		return id.String()
	}
}

func lastNote(t *testing.T, o admin.Operator) nodes.AuditEntry {
	t.Helper()
	log, err := nodes.NewAuditLog(o.State.Collection("audit"), "", "").Latest(t.Context(), 1)
	if err != nil || len(log) != 1 {
		t.Fatalf("the audit log: %v %v", log, err)
	}
	return log[0]
}

func TestScheduledOverCollections(t *testing.T) {
	t.Parallel()
	o, dbs, schedule := dueShop(t)
	want := map[string]bool{}
	for i := range 7 {
		want[schedule(i%2, []string{"a", "b", "c"}[i%3], time.Duration(i+1)*time.Hour)] = true
	}
	if page, err := o.Schedule().List(t.Context(), admin.ScheduledFilter{}, 0, ""); err != nil || len(page.Items) != 7 {
		t.Errorf("without a limit %d of 7 are shown, %v", len(page.Items), err)
	}

	for _, size := range []int{1, 2, 3, 4, 7, 8} {
		seen, after := map[string]bool{}, ""
		for pages := 1; ; pages++ {
			page, err := o.Schedule().List(t.Context(), admin.ScheduledFilter{}, size, after)
			if err != nil {
				t.Fatal(err)
			}
			if page.Total != 7 || len(page.Items) > size || pages > 8 {
				t.Fatalf("page %d of %d: %+v", pages, size, page)
			}
			for _, e := range page.Items {
				if seen[e.ID] || !want[e.ID] {
					t.Fatalf("%s is on two pages, or of an unknown service", e.ID)
				}
				seen[e.ID] = true
			}
			if after = page.Next; after == "" {
				break
			}
		}
		if len(seen) != 7 {
			t.Errorf("%d on pages of %d", len(seen), size)
		}
	}

	page, err := o.Schedule().List(t.Context(), admin.ScheduledFilter{Collection: dbs[1].Name() + ".outbox"}, 10, "")
	if err != nil || page.Total != 3 {
		t.Errorf("of one collection: %+v %v", page, err)
	}

	groups, err := o.Schedule().Summary(t.Context(), admin.ScheduledFilter{})
	if err != nil || len(groups) != 3 || groups[0].Count != 3 || groups[1].Count != 2 || !groups[0].Earliest.Before(groups[1].Earliest) {
		t.Errorf("%+v %v", groups, err)
	}
}

func TestScheduledCancelAndReschedule(t *testing.T) {
	t.Parallel()
	o, dbs, schedule := dueShop(t)
	taken, moved := schedule(0, "a", time.Hour), schedule(1, "a", time.Hour)
	schedule(0, "b", time.Hour)
	schedule(1, "b", time.Hour)
	// With recording mark, a claim leaves the document without its due time.
	if _, err := dbs[0].Collection("outbox").UpdateOne(t.Context(), bson.D{{Key: "_id", Value: event.ParseID(taken)}},
		bson.D{{Key: "$rename", Value: bson.D{{Key: "dueAt", Value: "scheduledFor"}}}}); err != nil {
		t.Fatal(err)
	}

	to := time.Now().Add(48 * time.Hour).Truncate(time.Millisecond)
	r, err := o.Schedule().Move(t.Context(), admin.ScheduledFilter{IDs: []string{taken, moved, "nobody"}}, to, nil)
	if err != nil || r.Moved != 1 || !slices.Equal(r.NotScheduled, []string{taken, "nobody"}) {
		t.Fatalf("%+v %v", r, err)
	}
	if _, err := o.Schedule().Move(t.Context(), admin.ScheduledFilter{}, to, nil); !errors.Is(err, admin.ErrNoCondition) {
		t.Errorf("a move without a condition: %v", err)
	}
	if n := lastNote(t, o); n.Kind != "scheduled_moved" || n.Fields.Lookup("actor").StringValue() != "ann" || n.Fields.Lookup("count").AsInt64() != 1 {
		t.Errorf("%+v", n)
	}

	page, err := o.Schedule().List(t.Context(), admin.ScheduledFilter{From: to, To: to.Add(time.Second)}, 10, "")
	if err != nil || len(page.Items) != 1 || page.Items[0].ID != moved {
		t.Errorf("%+v %v", page, err)
	}
	if _, err := o.Schedule().Cancel(t.Context(), admin.ScheduledFilter{Collection: dbs[0].Name() + ".outbox"}, nil); !errors.Is(err, admin.ErrNoCondition) {
		t.Errorf("without a condition: %v", err)
	}

	var progress []int64
	sooner := to.Add(-time.Hour)
	if r, err = o.Schedule().Move(t.Context(), admin.ScheduledFilter{Type: "b"}, sooner, func(n int64) { progress = append(progress, n) }); err != nil || r.Moved != 2 || !slices.Equal(progress, []int64{1, 2}) {
		t.Fatalf("of one type: %+v %v %v", r, progress, err)
	}
	if page, err = o.Schedule().List(t.Context(), admin.ScheduledFilter{From: sooner, To: to}, 10, ""); err != nil || page.Total != 2 {
		t.Errorf("after the move of a type: %+v %v", page, err)
	}

	progress = nil
	out, err := o.Schedule().Cancel(t.Context(), admin.ScheduledFilter{Type: "b"}, func(n int64) { progress = append(progress, n) })
	if err != nil || out.Cancelled != 2 || len(progress) != 2 || progress[1] != 2 {
		t.Fatalf("%+v %v %v", out, progress, err)
	}
	if n := lastNote(t, o); n.Kind != "scheduled_cancelled" || n.Fields.Lookup("type").StringValue() != "b" || n.Fields.Lookup("count").AsInt64() != 2 {
		t.Errorf("%+v", n)
	}
	if out, err := o.Schedule().Cancel(t.Context(), admin.ScheduledFilter{All: true}, nil); err != nil || out.Cancelled != 1 {
		t.Errorf("all: %+v %v; one is claimed", out, err)
	}

	if _, err := (admin.Operator{State: o.State, Watcher: "nobody"}).Schedule().Summary(t.Context(), admin.ScheduledFilter{}); err == nil {
		t.Error("an unknown watcher was accepted")
	}
}
