package admin_test

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.uber.org/goleak"

	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/lab/statetest"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/operate/admin"
	"github.com/outrelay/outrelay/internal/relay/stored/divisions"
	"github.com/outrelay/outrelay/internal/relay/stored/lease"
	"github.com/outrelay/outrelay/internal/relay/stored/nodes"
	"github.com/outrelay/outrelay/internal/relay/stored/state"
)

func TestMain(m *testing.M) {
	stacktest.Wide(4)
	goleak.VerifyTestMain(stacktest.Settled(m, goleak.Find))
}

func acquireLease(t *testing.T, state state.Database) *lease.Held {
	t.Helper()
	// This owner reads the controls often, and its lease does not expire on a busy machine.
	l := lease.New(lease.Config{Collection: state.Collection("watchers"), ID: "orders/0of1", Node: "n1", ReplicaSetID: "x", TTL: time.Hour, Renew: 200 * time.Millisecond})
	h, err := l.Acquire(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan struct{})
	go func() { defer close(ended); _ = h.Run(ctx, nil) }()
	t.Cleanup(func() { cancel(); <-ended })
	return h
}

func readWatcher(t *testing.T, state state.Database) admin.SlotStatus {
	t.Helper()
	s, err := admin.ReadStatus(t.Context(), state)
	if err != nil || len(s.Slots) != 1 {
		t.Fatalf("%v, %+v; want one watcher", err, s)
	}
	return s.Slots[0]
}

func waitYield(t *testing.T, h *lease.Held) {
	t.Helper()
	select {
	case <-h.Yield():
	case <-time.After(time.Minute):
		t.Fatal("the owner did not get the request to release the lease")
	}
}

func TestOperatorActionsReachTheOwnerAndTheLog(t *testing.T) {
	t.Parallel()
	for name, act := range map[string]struct {
		do   func(ctx context.Context, o admin.Operator) error
		kind nodes.Kind
	}{
		"pause": {func(ctx context.Context, o admin.Operator) error { return o.Lease().Pause(ctx) }, nodes.Paused},
		"pin":   {func(ctx context.Context, o admin.Operator) error { return o.Lease().PinAhead(ctx, "n2") }, "pinned"},
		"step down": {func(ctx context.Context, o admin.Operator) error {
			return o.Lease().StepDown(ctx, admin.StepDownOrder{Hold: time.Minute, Force: true})
		}, nodes.SteppedDown},
		"recover": {func(ctx context.Context, o admin.Operator) error { return o.Recovery().OrderSweep(ctx, time.Time{}) }, "recover_ordered"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			state := statetest.New(t, stacktest.Client(t))
			h := acquireLease(t, state)

			if w := readWatcher(t, state); w.Node != "n1" || w.ExpiresInMS <= 0 {
				t.Fatalf("status %+v, want n1 as owner", w)
			}

			o := admin.Operator{State: state, Watcher: "orders", Actor: "ann"}
			if err := act.do(t.Context(), o); err != nil {
				t.Fatal(err)
			}
			waitYield(t, h)

			log, err := nodes.NewAuditLog(state.Collection("audit"), "", "").Latest(t.Context(), 1)
			if err != nil || len(log) != 1 || log[0].Kind != act.kind || log[0].Fields.Lookup("actor").StringValue() != "ann" {
				t.Fatalf("the audit log contains %+v (%v), want %s by ann", log, err, act.kind)
			}
		})
	}
}

func TestPausedIsShownAndResumed(t *testing.T) {
	t.Parallel()
	state := statetest.New(t, stacktest.Client(t))
	h := acquireLease(t, state)
	o := admin.Operator{State: state, Watcher: "orders", Actor: "ann"}
	if err := o.Lease().Pause(t.Context()); err != nil {
		t.Fatal(err)
	}
	if w := readWatcher(t, state); w.State != "pausing" || w.Reason == "" {
		t.Fatalf("state %q for the reason %q while the owner still holds the lease, want pausing", w.State, w.Reason)
	}

	waitYield(t, h)
	if err := h.Release(t.Context(), nil); err != nil {
		t.Fatal(err)
	}
	if w := readWatcher(t, state); w.State != "paused" {
		t.Fatalf("state %q, want paused", w.State)
	}

	if err := o.Lease().Resume(t.Context()); err != nil {
		t.Fatal(err)
	}
	if w := readWatcher(t, state); w.State != "no-owner" {
		t.Fatalf("state %q, want no-owner", w.State)
	}
}

func TestUnknownWatcherIsNamed(t *testing.T) {
	t.Parallel()
	state := statetest.New(t, stacktest.Client(t))
	if err := (admin.Operator{State: state, Watcher: "nobody"}).Lease().Pause(t.Context()); !errors.Is(err, lease.ErrNotFound) {
		t.Fatalf("pausing an unknown watcher: %v", err)
	}
	if had, err := (admin.Operator{State: state, Watcher: "nobody"}).Recovery().ReleaseCollection(t.Context(), "a.b"); had || err != nil {
		t.Fatalf("releasing a collection that is not registered: %v %v", had, err)
	}
}

func TestRecoverMakesAVanishedDocumentAnew(t *testing.T) {
	t.Parallel()
	state := statetest.New(t, stacktest.Client(t))
	if err := (admin.Operator{State: state, Watcher: "orders", Actor: "ann"}).Recovery().OrderSweep(t.Context(), time.Unix(1000, 0)); err != nil {
		t.Fatal(err)
	}
	doc, _, err := lease.Read(t.Context(), state.Collection("watchers"), "orders/0of1")
	if err != nil || doc.Gap == nil || doc.Gap.From.T != 1000 {
		t.Fatalf("%+v (%v), want a document with a gap from 1000 on", doc, err)
	}
}

func isInvalid(err error) bool {
	var i *admin.InvalidError
	return errors.As(err, &i)
}

// An action applies to all slots of a watcher, or to the slot that the operator selects.
func TestN28_ActionsAreOnAllSlotsOrOne(t *testing.T) {
	t.Parallel()
	state := statetest.New(t, stacktest.Client(t))
	docs := state.Collection("watchers")
	for _, id := range []string{"orders/0of3", "orders/1of3", "orders2/0of1"} {
		if _, err := docs.InsertOne(t.Context(), bson.D{{Key: "_id", Value: id}, {Key: "owner", Value: nil}}); err != nil {
			t.Fatal(err)
		}
	}

	if err := divisions.New(state).DivideBegun(t.Context(), "orders", 3); err != nil {
		t.Fatal(err)
	}
	paused := func() (ids []string) {
		if err := docs.Distinct(t.Context(), "_id", bson.D{{Key: "control.paused", Value: true}}).Decode(&ids); err != nil {
			t.Fatal(err)
		}
		return ids
	}

	all := admin.Operator{State: state, Watcher: "orders", Actor: "ann"}
	one := all
	one.Slot = "1of3"
	if err := one.Lease().Pause(t.Context()); err != nil || !slices.Equal(paused(), []string{"orders/1of3"}) {
		t.Errorf("%v, %v", paused(), err)
	}
	all.Actor = "bob"
	if err := all.Lease().Pause(t.Context()); err != nil || !slices.Equal(paused(), []string{"orders/0of3", "orders/1of3"}) {
		t.Errorf("%v, %v", paused(), err)
	}
	// The slot that was paused before has waited since then.
	status, err := admin.ReadStatus(t.Context(), state)
	if err != nil {
		t.Fatal(err)
	}
	if first, second := status.Slots[1], status.Slots[0]; first.PausedBy != "ann" || second.PausedBy != "bob" || !first.PausedAt.Before(*second.PausedAt) {
		t.Errorf("paused by %q at %v and by %q at %v", first.PausedBy, first.PausedAt, second.PausedBy, second.PausedAt)
	}
	one.Slot = "2of3"
	if err := one.Lease().Resume(t.Context()); !errors.Is(err, lease.ErrNotFound) {
		t.Errorf("a slot that is not there: %v", err)
	}
	one.Slot = "3of3"
	if err := one.Lease().Resume(t.Context()); err == nil {
		t.Error("a slot that cannot be")
	}
	if err := all.Lease().Resume(t.Context()); err != nil || len(paused()) != 0 {
		t.Errorf("%v, %v", paused(), err)
	}
	if list, err := one.Lease().Slots(t.Context()); !isInvalid(err) {
		t.Errorf("%+v, %v", list, err)
	}
	if err := one.Recovery().OrderSweep(t.Context(), time.Time{}); !isInvalid(err) {
		t.Errorf("a sweep for a slot that cannot be: %v", err)
	}
	one.Slot = "0of2"
	if err := one.Recovery().OrderSweep(t.Context(), time.Time{}); !isInvalid(err) {
		t.Errorf("a sweep for a slot of another division: %v", err)
	}
	if list, err := all.Lease().Slots(t.Context()); err != nil || len(list) != 2 || list[0].Slot != "0of3" || list[1].Slot != "1of3" {
		t.Errorf("the slots are %+v, %v", list, err)
	}
	one.Slot = "1of3"
	if list, err := one.Lease().Slots(t.Context()); err != nil || len(list) != 1 || list[0].Slot != "1of3" {
		t.Errorf("the slot is %+v, %v", list, err)
	}
	// A sweep is ordered for the slot whose document is lost, too.
	if err := all.Recovery().OrderSweep(t.Context(), time.Time{}); err != nil {
		t.Fatal(err)
	}
	n, err := docs.CountDocuments(t.Context(), bson.D{{Key: "gap.reason", Value: lease.GapRequested}})
	if err != nil || n != 3 {
		t.Errorf("%d sweeps are ordered, %v", n, err)
	}
}

// The log contains the slots whose action succeeded, although it failed for others.
func TestN28_AnActionOnSomeSlotsIsWrittenDown(t *testing.T) {
	t.Parallel()
	state := statetest.New(t, stacktest.Client(t))
	docs := state.Collection("watchers")
	later := time.Now().Add(time.Hour)
	for id, until := range map[string]time.Time{"orders/0of2": later, "orders/1of2": time.UnixMilli(0)} {
		if _, err := docs.InsertOne(t.Context(), bson.D{{Key: "_id", Value: id}, {Key: "owner", Value: nil}, {Key: "expiresAt", Value: until}}); err != nil {
			t.Fatal(err)
		}
	}

	o := admin.Operator{State: state, Watcher: "orders", Actor: "ann"}
	if err := o.Recovery().Adopt(t.Context()); !errors.Is(err, lease.ErrNotFound) {
		t.Errorf("a slot that is owned was adopted: %v", err)
	}
	log, err := nodes.NewAuditLog(state.Collection("audit"), "", "").Latest(t.Context(), 1)
	if err != nil || len(log) != 1 || log[0].Kind != "copy_accepted" {
		t.Errorf("the audit log contains %+v, %v", log, err)
	}
}

// Orders that would stop a watcher, or do nothing, are rejected.
func TestOrdersThatCannotBeMeantAreRejected(t *testing.T) {
	t.Parallel()
	state := statetest.New(t, stacktest.Client(t))
	acquireLease(t, state)
	o := admin.Operator{State: state, Watcher: "orders", Actor: "ann"}
	registry := nodes.NewNodes(state.Collection("nodes"))
	for node, of := range map[string]string{"n2": "orders", "other": "payments"} {
		if _, err := registry.Heartbeat(t.Context(), nodes.Sign{Node: node, Watchers: []string{of}, KafkaReachable: true}); err != nil {
			t.Fatal(err)
		}
	}

	if err := o.Lease().Pin(t.Context(), "other"); !errors.Is(err, admin.ErrOtherNode) {
		t.Errorf("a pin to a node that lives and works for another watcher: %v", err)
	}
	if w := readWatcher(t, state); w.Pin != "" {
		t.Errorf("pinned to %q", w.Pin)
	}
	if err := o.Lease().Pin(t.Context(), "not-started-yet"); !errors.Is(err, admin.ErrUnknownNode) || !strings.Contains(err.Error(), "n2") || readWatcher(t, state).Pin != "" {
		t.Errorf("a pin to a node that has never run: %v", err)
	}
	if err := o.Lease().PinAhead(t.Context(), "not-started-yet"); err != nil || readWatcher(t, state).Pin != "not-started-yet" {
		t.Errorf("a pin before the first start: %v", err)
	}
	for _, node := range []string{"n2", ""} {
		if err := o.Lease().Pin(t.Context(), node); err != nil || readWatcher(t, state).Pin != node {
			t.Errorf("a pin to %q: %v", node, err)
		}
	}

	if _, err := o.Nodes().Release(t.Context(), "nosuch", time.Minute); !errors.Is(err, mongodb.ErrNotFound) {
		t.Errorf("a release of a node that does not exist: %v", err)
	}
	if err := o.Lease().StepDown(t.Context(), admin.StepDownOrder{}); !isInvalid(err) {
		t.Errorf("a step-down for no time: %v", err)
	}
}

// A step-down that would stop the delivery is rejected: no node but the owner is alive, runs the watcher, and is not kept away by a pin.
func TestAStepDownNeedsAStandby(t *testing.T) {
	t.Parallel()
	state := statetest.New(t, stacktest.Client(t))
	acquireLease(t, state)
	o := admin.Operator{State: state, Watcher: "orders", Actor: "ann"}
	registry := nodes.NewNodes(state.Collection("nodes"))
	beat := func(node, watcher string, at time.Time) {
		t.Helper()
		_, err := registry.Heartbeat(t.Context(), nodes.Sign{Node: node, Watchers: []string{watcher}})
		if err == nil {
			_, err = state.Collection("nodes").UpdateByID(t.Context(), node, bson.D{{Key: "$set", Value: bson.D{{Key: "seenAt", Value: at}}}})
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	later := time.Now().Add(time.Hour)
	reject := func(when string) {
		t.Helper()
		err := o.Lease().StepDown(t.Context(), admin.StepDownOrder{Hold: 30 * time.Second})
		if !errors.Is(err, admin.ErrNoStandby) || readWatcher(t, state).StepDownUntil != nil {
			t.Fatalf("%s: %v, want ErrNoStandby and no step-down", when, err)
		}
		for _, want := range []string{"orders/0of1", "nothing of it is sent for 30s", "start a second node"} {
			if !strings.Contains(err.Error(), want) {
				t.Errorf("%s: the error %q lacks %q", when, err, want)
			}
		}
	}

	beat("n1", "orders", later)
	beat("elsewhere", "payments", later)
	beat("n2", "orders", time.Now().Add(-time.Hour))
	reject("the other node is dead")
	beat("n2", "orders", later)
	if err := o.Lease().Pin(t.Context(), "n1"); err != nil {
		t.Fatal(err)
	}
	reject("the watcher is pinned to its owner")

	if err := o.Lease().Pin(t.Context(), ""); err != nil {
		t.Fatal(err)
	}
	if err := o.Lease().StepDown(t.Context(), admin.StepDownOrder{Hold: 30 * time.Second}); err != nil || readWatcher(t, state).StepDownUntil == nil {
		t.Errorf("with a standby: %v", err)
	}
}
