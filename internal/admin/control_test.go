package admin_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.uber.org/goleak"

	"github.com/outrelay/outrelay/internal/admin"
	"github.com/outrelay/outrelay/internal/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/lease"
	"github.com/outrelay/outrelay/internal/store"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func held(t *testing.T, state *mongo.Database) *lease.Held {
	t.Helper()
	l, err := lease.New(lease.Config{Collection: state.Collection("watchers"), ID: "orders/" + admin.Slot, Node: "n1", ReplicaSetID: "x", TTL: time.Second})
	if err != nil {
		t.Fatal(err)
	}
	h, err := l.Acquire(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan struct{})
	go func() { defer close(ended); _ = h.Run(ctx) }()
	t.Cleanup(func() { cancel(); <-ended })
	return h
}

func watcher(t *testing.T, state *mongo.Database) admin.Watcher {
	t.Helper()
	s, err := admin.ReadStatus(t.Context(), state)
	if err != nil || len(s.Watchers) != 1 {
		t.Fatalf("%v, %+v; want one watcher", err, s)
	}
	return s.Watchers[0]
}

func yields(t *testing.T, h *lease.Held) {
	t.Helper()
	for {
		select {
		case c := <-h.Control():
			if c.Yield != "" {
				return
			}
		case <-time.After(10 * time.Second):
			t.Fatal("the owner is never told to give the lease back")
		}
	}
}

func TestOperatorActionsReachTheOwnerAndTheLog(t *testing.T) {
	t.Parallel()
	for name, act := range map[string]struct {
		do   func(ctx context.Context, o admin.Operator) error
		kind store.Kind
	}{
		"pause":     {func(ctx context.Context, o admin.Operator) error { return o.Pause(ctx) }, store.Paused},
		"pin":       {func(ctx context.Context, o admin.Operator) error { return o.Pin(ctx, "n2") }, "pinned"},
		"step down": {func(ctx context.Context, o admin.Operator) error { return o.StepDown(ctx, time.Minute) }, store.SteppedDown},
		"recover":   {func(ctx context.Context, o admin.Operator) error { return o.Recover(ctx, time.Time{}) }, "recover_ordered"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			state := stacktest.Database(t, stacktest.Client(t))
			h := held(t, state)
			if w := watcher(t, state); w.Node != "n1" || w.ExpiresInMS <= 0 {
				t.Fatalf("status %+v, want n1 as owner", w)
			}
			o := admin.Operator{State: state, Watcher: "orders", Actor: "ann"}
			if err := act.do(t.Context(), o); err != nil {
				t.Fatal(err)
			}
			yields(t, h)
			log, err := store.NewEvents(state.Collection("events"), "", "").Latest(t.Context(), 1)
			if err != nil || len(log) != 1 || log[0].Kind != act.kind || log[0].Fields.Lookup("actor").StringValue() != "ann" {
				t.Fatalf("the events log says %+v (%v), want %s by ann", log, err, act.kind)
			}
		})
	}
}

func TestPausedIsShownAndResumed(t *testing.T) {
	t.Parallel()
	state := stacktest.Database(t, stacktest.Client(t))
	h := held(t, state)
	o := admin.Operator{State: state, Watcher: "orders", Actor: "ann"}
	if err := o.Pause(t.Context()); err != nil {
		t.Fatal(err)
	}
	yields(t, h)
	if err := h.Release(t.Context(), lease.Checkpoint{}); err != nil {
		t.Fatal(err)
	}
	if w := watcher(t, state); w.State != "paused" {
		t.Fatalf("state %q, want paused", w.State)
	}
	if err := o.Resume(t.Context()); err != nil {
		t.Fatal(err)
	}
	if w := watcher(t, state); w.State != "no-owner" {
		t.Fatalf("state %q, want no-owner", w.State)
	}
}

func TestUnknownWatcherIsNamed(t *testing.T) {
	t.Parallel()
	state := stacktest.Database(t, stacktest.Client(t))
	if err := (admin.Operator{State: state, Watcher: "nobody"}).Pause(t.Context()); !errors.Is(err, lease.ErrNotFound) {
		t.Fatalf("pausing an unknown watcher: %v", err)
	}
	if had, err := (admin.Operator{State: state, Watcher: "nobody"}).Release(t.Context(), "a.b"); had || err != nil {
		t.Fatalf("releasing what is not claimed: %v %v", had, err)
	}
}

func TestRecoverMakesAVanishedDocumentAnew(t *testing.T) {
	t.Parallel()
	state := stacktest.Database(t, stacktest.Client(t))
	if err := (admin.Operator{State: state, Watcher: "orders", Actor: "ann"}).Recover(t.Context(), time.Unix(1000, 0)); err != nil {
		t.Fatal(err)
	}
	doc, _, err := lease.Read(t.Context(), state.Collection("watchers"), "orders/"+admin.Slot)
	if err != nil || doc.Gap == nil || doc.Gap.From.T != 1000 {
		t.Fatalf("%+v (%v), want a document with a gap from 1000 on", doc, err)
	}
}
