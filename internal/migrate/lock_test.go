package migrate

import (
	"context"
	"errors"
	"sync"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/event"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/store"
)

// counting makes a client that counts the createIndexes commands.
func counting(t *testing.T, app string) (*mongo.Client, func() int) {
	var mu sync.Mutex
	n := 0
	c := stacktest.Client(t, options.Client().SetAppName(app).SetMonitor(&event.CommandMonitor{Started: func(_ context.Context, e *event.CommandStartedEvent) {
		if e.CommandName == "createIndexes" {
			mu.Lock()
			n++
			mu.Unlock()
		}
	}}))
	return c, func() int { mu.Lock(); defer mu.Unlock(); return n }
}

func TestOfManyAtOnceOneMigrates(t *testing.T) {
	t.Parallel()
	c, creates := counting(t, "")
	d := deploy(t, c, "outbox")
	var wg sync.WaitGroup
	reports := make([]Report, 6)
	for i := range reports {
		wg.Go(func() {
			m := d.migrator(history())
			m.Node = string(rune('a' + i))
			var err error
			if reports[i], err = m.Up(t.Context()); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	did := 0
	for _, r := range reports {
		did += len(r.Applied)
		if !r.OK() {
			t.Errorf("%+v", r)
		}
	}
	if did != len(history()) {
		t.Errorf("%d steps were taken, want each once", did)
	}
	if n := creates(); n != 3 { // events, and on the outbox a_1_c_1 and b_1: a_1 is superseded
		t.Errorf("%d times createIndexes, want 3", n)
	}
}

func TestTheLockOfADeadHolderIsTaken(t *testing.T) {
	t.Parallel()
	d := deploy(t, stacktest.Client(t), "outbox")
	coll := store.Majority(d.state.Collection(Collection))
	dead := newLock(coll, "dead", "0.9", 1500*time.Millisecond)
	if ok, err := dead.take(t.Context()); err != nil || !ok {
		t.Fatal(ok, err)
	}
	if s, err := d.migrator(history()).Status(t.Context()); err != nil || s.Lock == nil || s.Lock.Node != "dead" || s.Lock.ExpiresInMS <= 0 {
		t.Errorf("status %+v, %v", s.Lock, err)
	}
	if ok, err := newLock(coll, "b", "1.0", time.Second).take(t.Context()); err != nil || ok {
		t.Errorf("the lock of a live holder was taken: %v, %v", ok, err)
	}
	began := time.Now()
	if r := up(t, d.migrator(history())); len(r.Applied) != 3 {
		t.Errorf("%+v", r)
	}
	if waited := time.Since(began); waited < time.Second {
		t.Errorf("the lock was stolen after %v", waited)
	}
	// The dead one wakes up: it learns that the lock is not its own, and leaves the other's alone.
	other := newLock(coll, "other", "1.0", time.Minute)
	if ok, err := other.take(t.Context()); err != nil || !ok {
		t.Fatal(ok, err)
	}
	err := dead.hold(t.Context(), func(ctx context.Context) error { <-ctx.Done(); return context.Cause(ctx) })
	if !errors.Is(err, errLockLost) {
		t.Errorf("the deposed holder's work ended with %v", err)
	}
	if n, err := coll.CountDocuments(t.Context(), bson.D{{Key: "_id", Value: lockID}, {Key: "owner", Value: other.owner}}); err != nil || n != 1 {
		t.Errorf("the other's lock is gone: %d, %v", n, err)
	}
}

func TestWaitingForTheLockEndsWithTheContext(t *testing.T) {
	t.Parallel()
	d := deploy(t, stacktest.Client(t), "outbox")
	if ok, err := newLock(store.Majority(d.state.Collection(Collection)), "a", "", time.Minute).take(t.Context()); err != nil || !ok {
		t.Fatal(ok, err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
	defer cancel()
	if _, err := d.migrator(history()).Up(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("%v", err)
	}
}

func TestARenewedLockOutlivesItsTime(t *testing.T) {
	t.Parallel()
	coll := store.Majority(deploy(t, stacktest.Client(t)).state.Collection(Collection))
	a, b := newLock(coll, "a", "", 2*time.Second), newLock(coll, "b", "", time.Second)
	if ok, err := a.take(t.Context()); err != nil || !ok {
		t.Fatal(ok, err)
	}
	err := a.hold(t.Context(), func(ctx context.Context) error {
		for end := time.Now().Add(2 * a.ttl); time.Now().Before(end); {
			if ok, err := b.take(ctx); err != nil || ok {
				t.Fatalf("taken while it is held: %v, %v", ok, err)
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if ok, err := b.take(t.Context()); err != nil || !ok {
		t.Errorf("not given back: %v, %v", ok, err)
	}
}
