package admin_test

import (
	"context"
	"slices"
	"testing"

	"github.com/outrelay/outrelay/internal/admin"
	"github.com/outrelay/outrelay/internal/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/nodes"
	"github.com/outrelay/outrelay/internal/outboxes"
	"github.com/outrelay/outrelay/internal/state"
	"go.mongodb.org/mongo-driver/v2/bson"
)

func TestMigrationsAreInTheEventsLog(t *testing.T) {
	t.Parallel()
	c := stacktest.Client(t)
	state, shop := state.Of(stacktest.Database(t, c)), stacktest.Database(t, c)
	if err := shop.CreateCollection(t.Context(), "outbox"); err != nil {
		t.Fatal(err)
	}

	op := admin.Operator{
		State: state, Watcher: "orders", Actor: "ann", Node: "n1", Version: "1.0",
		Outboxes: func(context.Context) ([]outboxes.Outbox, error) {
			return []outboxes.Outbox{{DB: shop.Name(), Coll: "outbox"}}, nil
		},
	}

	m := op.Indexes()
	latest := func(want nodes.Kind) {
		t.Helper()
		log, err := nodes.NewEvents(state.Collection("events"), "", "").Latest(t.Context(), 1)
		if err != nil || len(log) != 1 || log[0].Kind != want || log[0].Fields.Lookup("actor").StringValue() != "ann" {
			t.Errorf("the events log contains %+v (%v), want %s by ann", log, err, want)
		}
	}
	if r, err := m.Migrate(t.Context()); err != nil || !r.OK() || len(r.Applied) == 0 {
		t.Fatalf("%+v, %v", r, err)
	}

	latest("migrated")
	if s, err := m.Migrations(t.Context()); err != nil || len(s.Steps) == 0 || s.Steps[0].State != "applied" {
		t.Errorf("%+v, %v", s, err)
	}
	if err := shop.Collection("outbox").Indexes().DropOne(t.Context(), "ts_1"); err != nil {
		t.Fatal(err)
	}
	if v, err := m.Verify(t.Context(), false); err != nil || v.OK() {
		t.Errorf("%+v, %v", v, err)
	}

	latest("migrated")
	if v, err := m.Verify(t.Context(), true); err != nil || !v.OK() {
		t.Errorf("%+v, %v", v, err)
	}

	latest("indexes_repaired")
}

func TestTheIndexesOfAnotherWatcherAreThoseOfItsOutboxes(t *testing.T) {
	t.Parallel()
	c := stacktest.Client(t)
	state, shop := state.Of(stacktest.Database(t, c)), stacktest.Database(t, c)
	for _, name := range []string{"outbox", "bills"} {
		if err := shop.CreateCollection(t.Context(), name); err != nil {
			t.Fatal(err)
		}
	}
	all, err := outboxes.ListOutboxes(t.Context(), c, func(db, _ []byte) bool { return string(db) == shop.Name() }, shop.Name())
	if err != nil || len(all) != 2 {
		t.Fatalf("%+v, %v", all, err)
	}
	bills := all[slices.IndexFunc(all, func(o outboxes.Outbox) bool { return o.Coll == "bills" })]
	if _, err := outboxes.NewRegistry(state.Collection("collections")).Register(t.Context(), bills.UUID, bills.NS(), "billing", bson.Timestamp{}); err != nil {
		t.Fatal(err)
	}

	op := admin.Operator{
		State: state, Watcher: "orders", Actor: "ann", Node: "n1", Version: "1.0",
		Outboxes: func(context.Context) ([]outboxes.Outbox, error) {
			return []outboxes.Outbox{{DB: shop.Name(), Coll: "outbox"}}, nil
		},
	}
	v, err := op.ForWatcher("billing").Indexes().Verify(t.Context(), false)
	if err != nil {
		t.Fatal(err)
	}
	var compared []string
	for _, d := range v.Drift {
		compared = append(compared, d.Collection)
	}
	if !slices.Contains(compared, bills.NS()) || slices.Contains(compared, shop.Name()+".outbox") {
		t.Errorf("the check of watcher billing compared %q", compared)
	}
}
