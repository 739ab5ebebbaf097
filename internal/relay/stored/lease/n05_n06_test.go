package lease

import (
	"context"
	"errors"
	"maps"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
)

func TestN05_CopiedStateIsRejected(t *testing.T) {
	t.Parallel()
	coll, _ := newCollection(t)
	h := mustAcquire(t, newLease(t, longConfig(coll, "a")))
	instance := h.Document().Instance
	cfg := shortConfig(coll, "b")
	cfg.ReplicaSetID = "there"
	if err := Adopt(t.Context(), coll, slotID, "there"); err == nil {
		t.Error("Adopt accepted state that is in use")
	}
	if err := h.Release(t.Context(), nil); err != nil {
		t.Fatal(err)
	}

	before := readStored(t, coll)
	_, err := newLease(t, cfg).Acquire(t.Context())
	if !errors.Is(err, errCopiedState) || !strings.Contains(err.Error(), "written on here, this is there") ||
		!strings.Contains(err.Error(), "recover --accept-copy") {
		t.Fatalf("Acquire of copied state returned %v, want errCopiedState with both ids and the fix", err)
	}

	// If the first read came too early to detect the copy, the server itself rejects the acquisition.
	c, err := newLease(t, cfg).newContender()
	if err != nil {
		t.Fatal(err)
	}
	defer c.endSession()
	_, err = c.attemptAcquire(t.Context(), true)
	if final, ok := errors.AsType[*finalError](err); !ok || !errors.Is(final.error, errCopiedState) {
		t.Errorf("the attempt returned %v", err)
	}
	if after := readStored(t, coll); after.Epoch != before.Epoch || after.Owner != "" {
		t.Errorf("the rejected acquisition changed the document: %+v", after)
	}
	if err := Adopt(t.Context(), coll, slotID, "there"); err != nil {
		t.Fatal(err)
	}

	b := mustAcquire(t, newLease(t, cfg))
	if b.Document().Instance == instance {
		t.Error("adopted state has the same instance, so the same transactional ids")
	}
}

func TestN05_TheReplicaSetReportsItsID(t *testing.T) {
	t.Parallel()
	id, err := ReplicaSetID(t.Context(), stacktest.Client(t))
	if err != nil || len(id) != 24 {
		t.Errorf("id %q, %v", id, err)
	}
	coll, _ := newCollection(t)
	cfg := shortConfig(coll, "a")
	cfg.ReplicaSetID = ""
	if got := mustAcquire(t, newLease(t, cfg)).Document().ReplicaSetID; got != id {
		t.Errorf("stored id %q, want the server's %q", got, id)
	}
}

func awaitYield(t *testing.T, h *Held) {
	t.Helper()
	receiveWithin(t, h.Yield(), "the owner gets the request to release")
}

func startAcquire(t *testing.T, l *Lease) (<-chan *Held, context.CancelFunc) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	got := make(chan *Held, 1)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		if h, err := l.Acquire(ctx); err == nil {
			got <- h
		}
	}()

	t.Cleanup(func() { cancel(); <-ended })
	return got, cancel
}

func TestN06_PauseStopsTheOwnerAndEveryStandby(t *testing.T) {
	t.Parallel()
	coll, _ := newCollection(t)
	h := mustAcquire(t, newLease(t, shortConfig(coll, "a")))
	startRun(t, h)
	if err := Pause(t.Context(), coll, slotID, "ann"); err != nil {
		t.Fatal(err)
	}

	awaitYield(t, h)
	if err := h.Release(t.Context(), nil); err != nil {
		t.Fatal(err)
	}

	b := newLease(t, shortConfig(coll, "b"))
	got, _ := startAcquire(t, b)
	stacktest.Eventually(t, "the reason of the standby",
		func() bool { return *b.reason.Load() == "paused by an operator" })
	c, err := b.newContender()
	if err != nil {
		t.Fatal(err)
	}
	defer c.endSession()
	if won, err := c.attemptAcquire(t.Context(), true); won != nil || err != nil {
		t.Errorf("a paused watcher was acquired: %v, %v", won, err)
	}
	if err := Resume(t.Context(), coll, slotID); err != nil {
		t.Fatal(err)
	}

	_ = receiveWithin(t, got, "taking over after the pause").Release(t.Context(), nil)
	if err := Pause(t.Context(), coll, "no/0of1", "ann"); !errors.Is(err, ErrNotFound) {
		t.Errorf("Pause of a missing watcher returned %v, want ErrNotFound", err)
	}
}

func TestN06_APinHandsOverAndLapsesWithADeadNode(t *testing.T) {
	t.Parallel()
	coll, _ := newCollection(t)
	var alive atomic.Bool
	cfg := shortConfig(coll, "a")
	cfg.NodeAlive = func(_ context.Context, node string) bool { return node == "b" && alive.Load() }
	a := newLease(t, cfg)
	h := mustAcquire(t, a)
	startRun(t, h)
	if err := Pin(t.Context(), coll, slotID, "b"); err != nil {
		t.Fatal(err)
	}

	// b is dead, so the owner stays.
	stacktest.Eventually(t, "the owner disregards the pin", func() bool { return h.LapsedPin() == "b" })

	alive.Store(true)
	awaitYield(t, h)
	if h.LapsedPin() != "" {
		t.Errorf("lapsed pin %q, want none: the node is alive", h.LapsedPin())
	}
	if err := h.Release(t.Context(), nil); err != nil {
		t.Fatal(err)
	}

	got, cancel := startAcquire(t, a)
	stacktest.Eventually(t, "a keeps away", func() bool { return *a.reason.Load() == "pinned to node b" })
	b := mustAcquire(t, newLease(t, shortConfig(coll, "b")))
	if err := b.Release(t.Context(), nil); err != nil {
		t.Fatal(err)
	}

	cancel()
	select {
	case <-got:
		t.Error("a acquired a lease that is pinned to b")
	default:
	}

	// b dies. After 10 × ttl the pin lapses.
	alive.Store(false)
	cfg.TTL, cfg.Renew = 150*time.Millisecond, 40*time.Millisecond
	expired := readStored(t, coll).ExpiresAt
	h = mustAcquire(t, newLease(t, cfg))
	if d := h.Document().AcquiredAt.Sub(expired); d < pinLapse*cfg.TTL {
		t.Errorf("the pin lapsed after %v", d)
	}
	if h.LapsedPin() != "b" {
		t.Errorf("lapsed pin of the next owner is %q", h.LapsedPin())
	}

	startRun(t, h)
	if err := Pin(t.Context(), coll, slotID, ""); err != nil {
		t.Fatal(err)
	}

	stacktest.Eventually(t, "a removed pin is not lapsed", func() bool { return h.LapsedPin() == "" })
	select {
	case reason := <-h.Yield():
		t.Errorf("the owner has to release: %s", reason)
	default:
	}
}

func TestN06_StepDownHoldsOffTheNodeThatStepsDown(t *testing.T) {
	t.Parallel()
	coll, _ := newCollection(t)
	a := newLease(t, shortConfig(coll, "a"))
	h := mustAcquire(t, a)
	startRun(t, h)
	if err := StepDown(t.Context(), coll, slotID, time.Hour); err != nil {
		t.Fatal(err)
	}

	awaitYield(t, h)
	if err := h.Release(t.Context(), nil); err != nil {
		t.Fatal(err)
	}

	c, err := a.newContender()
	if err != nil {
		t.Fatal(err)
	}
	defer c.endSession()
	if won, err := c.attemptAcquire(t.Context(), true); won != nil || err != nil {
		t.Fatalf("the node that stepped down took over from itself: %v", err)
	}

	b := mustAcquire(t, newLease(t, shortConfig(coll, "b")))
	startRun(t, b)
	if err := b.Save(t.Context(), Update{}); err != nil {
		t.Fatal(err)
	}

	select {
	case reason := <-b.Yield():
		t.Errorf("the next owner got the step-down too: %s", reason)
	default:
	}
	if err := b.Release(t.Context(), nil); err != nil {
		t.Fatal(err)
	}

	order := bson.D{{Key: "control.stepDownUntil", Value: op("$add", "$$NOW", 1500)}}
	soon := mongo.Pipeline{{{Key: "$set", Value: order}}}
	if err := updateControl(t.Context(), coll, slotID, soon); err != nil {
		t.Fatal(err)
	}

	until := readStored(t, coll).Control.StepDownUntil
	h = mustAcquire(t, a)
	if early := until.Sub(h.Document().AcquiredAt); early > 0 {
		t.Errorf("a acquired the lease %v too early", early)
	}

	// After a voluntary step-down, the process holds off by its own clock.
	_ = h.Release(t.Context(), nil)
	start := time.Now()
	a.HoldOff(400 * time.Millisecond)
	mustAcquire(t, a)
	if d := time.Since(start); d < 390*time.Millisecond {
		t.Errorf("acquired after %v, want at least 400 ms", d)
	}
}

// A reslice that fails resumes only the slots that it has paused.
func TestAResliceResumesOnlyItsOwnPauses(t *testing.T) {
	t.Parallel()
	coll, _ := newCollection(t)
	pausedBy := map[string]string{"orders/0of3": "ann", "orders/1of3": ResliceActor, "orders/2of3": ""}
	for id, actor := range pausedBy {
		if _, err := coll.InsertOne(t.Context(), bson.D{{Key: "_id", Value: id}}); err != nil {
			t.Fatal(err)
		}
		if actor == "" {
			continue
		}
		if err := Pause(t.Context(), coll, id, actor); err != nil {
			t.Fatal(err)
		}
	}

	if err := ResumeAfterReslice(t.Context(), coll, slices.Sorted(maps.Keys(pausedBy))); err != nil {
		t.Fatal(err)
	}
	for id, actor := range pausedBy {
		now, _, err := Read(t.Context(), coll, id)
		if err != nil || now.Control.IsByOperator() != (actor == "ann") || now.Control.Paused != (actor == "ann") {
			t.Errorf("%s, paused by %q: %+v, %v", id, actor, now.Control, err)
		}
	}
}
