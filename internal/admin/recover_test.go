package admin_test

import (
	"errors"
	"slices"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/admin"
	"github.com/outrelay/outrelay/internal/store"
)

func TestRecoverPlanCountsWhatASweepBrings(t *testing.T) {
	t.Parallel()
	f := openOffice(t)
	before := time.Now().Add(-time.Hour)
	f.insert(f.a,
		append(letterOf("old", planted), bson.E{Key: "ts", Value: bson.Timestamp{T: 1000}}),
		append(letterOf("new", planted), bson.E{Key: "ts", Value: bson.Timestamp{}}), // stamped by the server
		letterOf("unstamped", planted),
		append(letterOf("waits", planted), bson.E{Key: "state", Value: "parked"}),
		append(letterOf("later", planted), bson.E{Key: "dueAt", Value: time.Now().Add(time.Hour)}),
		append(letterOf("sent", planted), bson.E{Key: "sentAt", Value: time.Now()}))
	for from, want := range map[time.Time]int64{{}: 3, before: 2, time.Now().Add(time.Hour): 1} {
		got, err := f.op.RecoverPlan(t.Context(), from)
		if err != nil || len(got) != 2 || !slices.Contains(got, admin.Swept{Collection: store.Namespace(f.a), Envelopes: want}) {
			t.Errorf("from %v: %+v, %v; want %d", from, got, err, want)
		}
	}
	if _, err := (admin.Operator{State: f.state, Watcher: "nobody"}).RecoverPlan(t.Context(), before); !errors.Is(err, admin.ErrNoCollections) {
		t.Errorf("a watcher without collections: %v", err)
	}
}
