package admin_test

import (
	"errors"
	"slices"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/operate/admin"
	"github.com/outrelay/outrelay/internal/relay/stored/lease"
)

// TestRecoverRejectsTheFuture: a sweep from a time in the future would skip envelopes that are not delivered. Such an
// order is a mistake with a time zone.
func TestRecoverRejectsTheFuture(t *testing.T) {
	t.Parallel()
	f := openOffice(t)
	for _, from := range []time.Time{time.Now().Add(time.Hour), time.Unix(-1, 0)} {
		if _, err := f.op.Recovery().PlanSweep(t.Context(), from); !isInvalid(err) {
			t.Errorf("a dry run from %v: %v", from, err)
		}
		if err := f.op.Recovery().OrderSweep(t.Context(), from); !isInvalid(err) {
			t.Errorf("an order from %v: %v", from, err)
		}
	}
}

func TestSweepPlanCountsTheEnvelopesOfASweep(t *testing.T) {
	t.Parallel()
	f := openOffice(t)
	before := time.Now().Add(-time.Hour)
	f.insert(f.a,
		append(letterOf("old", planted), bson.E{Key: "ts", Value: bson.Timestamp{T: 1000}}),
		append(letterOf("new", planted), bson.E{Key: "ts", Value: bson.Timestamp{}}), // stamped by the server
		letterOf("unstamped", planted),
		append(letterOf("later", planted), bson.E{Key: "dueAt", Value: time.Now().Add(time.Hour)}),
		append(letterOf("sent", planted), bson.E{Key: "sentAt", Value: time.Now()}, bson.E{Key: "sent", Value: bson.A{}}))
	for from, want := range map[time.Time]int64{{}: 3, before: 2} {
		got, err := f.op.Recovery().PlanSweep(t.Context(), from)
		if err != nil || len(got) != 2 || !slices.Contains(got, admin.SweepCount{Collection: mongodb.Namespace(f.a), Envelopes: want}) {
			t.Errorf("from %v: %+v, %v; want %d", from, got, err, want)
		}
	}

	if _, err := (admin.Operator{State: f.state, Watcher: "nobody"}).Recovery().PlanSweep(t.Context(), before); !errors.Is(err, admin.ErrNoCollections) {
		t.Errorf("a watcher without collections: %v", err)
	}
}

// TestRecoverOfLostStateKeepsTheSlots: a document of another number of slots would divide the watcher in two ways.
func TestRecoverOfLostStateKeepsTheSlots(t *testing.T) {
	t.Parallel()
	f := openOffice(t)
	lost := f.op
	lost.Watcher, lost.Slots = "lost", 2
	if err := lost.Recovery().OrderSweep(t.Context(), time.Time{}); err != nil {
		t.Fatal(err)
	}
	ids, err := lease.ListIDs(t.Context(), f.state.Collection("watchers"), "lost")
	if err != nil || !slices.Equal(ids, []string{"lost/0of2", "lost/1of2"}) {
		t.Errorf("documents %q, %v", ids, err)
	}
}
