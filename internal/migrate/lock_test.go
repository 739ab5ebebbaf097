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
	"github.com/outrelay/outrelay/internal/mongodb"
)

// countBuilds returns a client, and a function that counts the indexes which its commands have built. A
// command that was repeated, or whose indexes were there already, does not count.
func countBuilds(t *testing.T, app string) (*mongo.Client, func() int) {
	var mu sync.Mutex
	n := 0
	c := stacktest.Client(t, options.Client().SetAppName(app).SetMonitor(&event.CommandMonitor{Succeeded: func(_ context.Context, e *event.CommandSucceededEvent) {
		if e.CommandName == "createIndexes" {
			mu.Lock()
			defer mu.Unlock()
			n += int(e.Reply.Lookup("numIndexesAfter").AsInt64() - e.Reply.Lookup("numIndexesBefore").AsInt64())
		}
	}}))
	return c, func() int { mu.Lock(); defer mu.Unlock(); return n }
}

func TestOfManyAtOnceOneMigrates(t *testing.T) {
	t.Parallel()
	c, builds := countBuilds(t, "")
	d := newDeployment(t, c, "outbox")
	var wg sync.WaitGroup
	reports := make([]Report, 6)
	for i := range reports {
		wg.Go(func() {
			m := d.newMigrator(history())
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
	// These are the index of the events, and a_1_c_1 and b_1 of the outbox. The index a_1 is superseded.
	if n := builds(); n != 3 {
		t.Errorf("%d indexes were built, want 3", n)
	}
}

func TestTheLockOfADeadHolderIsTaken(t *testing.T) {
	t.Parallel()
	d := newDeployment(t, stacktest.Client(t), "outbox")
	coll := mongodb.Majority(d.state.Collection(ledgerName))
	dead := newLock(coll, "dead", "0.9", time.Hour)
	if ok, err := dead.tryAcquire(t.Context()); err != nil || !ok {
		t.Fatal(ok, err)
	}
	if s, err := d.newMigrator(history()).Status(t.Context()); err != nil || s.Lock == nil || s.Lock.Node != "dead" || s.Lock.ExpiresInMS <= 0 {
		t.Errorf("status %+v, %v", s.Lock, err)
	}
	if ok, err := newLock(coll, "b", "1.0", time.Second).tryAcquire(t.Context()); err != nil || ok {
		t.Errorf("the lock of a live holder was taken: %v, %v", ok, err)
	}

	// The time of the lock and the times in the ledger are times of the server.
	var last lockDoc
	if err := coll.FindOneAndUpdate(t.Context(), bson.D{{Key: "_id", Value: lockID}}, mongo.Pipeline{{{Key: "$set", Value: bson.D{
		{Key: "expiresAt", Value: bson.D{{Key: "$add", Value: bson.A{"$$NOW", int64(1500)}}}},
	}}}}, options.FindOneAndUpdate().SetReturnDocument(options.After)).Decode(&last); err != nil {
		t.Fatal(err)
	}

	m := d.newMigrator(history())
	if r := mustMigrate(t, m); len(r.Applied) != 3 {
		t.Errorf("%+v", r)
	}

	s, err := m.Status(t.Context())
	if err != nil {
		t.Fatal(err)
	}

	for _, step := range s.Steps {
		if step.At.Before(last.ExpiresAt) {
			t.Errorf("the lock was stolen: it ended at %v, and step %s was taken at %v", last.ExpiresAt, step.ID, step.At)
		}
	}

	// The dead one wakes up: it learns that the lock is not its own, and leaves the other's alone.
	other := newLock(coll, "other", "1.0", time.Minute)
	if ok, err := other.tryAcquire(t.Context()); err != nil || !ok {
		t.Fatal(ok, err)
	}

	// With this ttl the process checks again soon.
	dead.ttl = time.Second
	err = dead.runHolding(t.Context(), func(ctx context.Context) error { <-ctx.Done(); return context.Cause(ctx) })
	if !errors.Is(err, errLockLost) {
		t.Errorf("the deposed holder's work ended with %v", err)
	}
	if n, err := coll.CountDocuments(t.Context(), bson.D{{Key: "_id", Value: lockID}, {Key: "owner", Value: other.owner}}); err != nil || n != 1 {
		t.Errorf("the other's lock is gone: %d, %v", n, err)
	}
}

func TestWaitingForTheLockEndsWithTheContext(t *testing.T) {
	t.Parallel()
	d := newDeployment(t, stacktest.Client(t), "outbox")
	if ok, err := newLock(mongodb.Majority(d.state.Collection(ledgerName)), "a", "", time.Minute).tryAcquire(t.Context()); err != nil || !ok {
		t.Fatal(ok, err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
	defer cancel()
	if _, err := d.newMigrator(history()).Up(ctx); !errors.Is(err, context.DeadlineExceeded) && !mongo.IsTimeout(err) {
		t.Errorf("%v", err)
	}
}

func TestARenewedLockOutlivesItsTime(t *testing.T) {
	t.Parallel()
	coll := mongodb.Majority(newDeployment(t, stacktest.Client(t)).state.Collection(ledgerName))
	a, b := newLock(coll, "a", "", 12*time.Second), newLock(coll, "b", "", time.Second)
	ends := func(ctx context.Context) time.Time {
		var l lockDoc
		if err := coll.FindOne(ctx, bson.D{{Key: "_id", Value: lockID}, {Key: "owner", Value: a.owner}}).Decode(&l); err != nil {
			t.Fatal("taken while it is held: ", err)
		}
		return l.ExpiresAt
	}
	if ok, err := a.tryAcquire(t.Context()); err != nil || !ok {
		t.Fatal(ok, err)
	}

	first := ends(t.Context())
	deadline := time.Now().Add(time.Minute)
	err := a.runHolding(t.Context(), func(ctx context.Context) error {
		// The lock lapses at this time if it is not renewed.
		for !ends(ctx).After(first) {
			if ok, err := b.tryAcquire(ctx); err != nil || ok || time.Now().After(deadline) {
				t.Fatalf("taken while it is held, or not renewed: %v, %v", ok, err)
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if ok, err := b.tryAcquire(t.Context()); err != nil || !ok {
		t.Errorf("not given back: %v, %v", ok, err)
	}
}
