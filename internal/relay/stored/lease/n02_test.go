package lease

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
)

func failingWrites() bson.D {
	return bson.D{{Key: "failCommands", Value: bson.A{"findAndModify", "update"}}, {Key: "closeConnection", Value: true}}
}

func TestN02_SuspendedIsNotLost(t *testing.T) {
	t.Parallel()
	coll, app := newCollection(t)
	cfg := shortConfig(coll, "a")

	// The transaction must finish within the ttl, also on a slow server.
	cfg.TTL = 3 * time.Second
	h := mustAcquire(t, newLease(t, cfg))
	ended := startRun(t, h)
	off := failCommand(t, app, "alwaysOn", failingWrites())
	stacktest.Eventually(t, "the work is suspended", func() bool { return !h.Valid() })
	fenced := make(chan error, 1)
	var runs atomic.Int64
	go func() {
		fenced <- h.Fenced(t.Context(), nil, func(context.Context) error {
			runs.Add(1)
			return nil
		})
	}()

	// The lease has expired on the server too, but no other process acquires it, so it is not lost.
	stacktest.Eventually(t, "the lease is expired", func() bool {
		d, now, err := Read(t.Context(), coll, slotID)
		return err == nil && now.After(d.ExpiresAt.Add(h.lease.cfg.TTL/2))
	})

	select {
	case err := <-ended:
		t.Fatalf("Run returned %v during the outage", err)
	case err := <-fenced:
		t.Fatalf("a transaction ended while the lease was suspended: %v", err)
	default:
	}
	if h.Context().Err() != nil {
		t.Fatal("the context ended during the outage")
	}

	off()
	stacktest.Eventually(t, "the work goes on", h.Valid)
	if err := receiveWithin(t, fenced, "the transaction that waited"); err != nil {
		t.Errorf("the delayed transaction returned %v", err)
	}
	if d := readStored(t, coll); d.Epoch != 1 || d.Owner != h.Document().Owner || d.Fence < 1 || d.Fence > runs.Load() {
		t.Errorf("epoch %d, fence %d after %d runs", d.Epoch, d.Fence, runs.Load())
	}
}

func TestN02_OnlyTheDocumentDecidesThatTheLeaseIsLost(t *testing.T) {
	t.Parallel()
	coll, app := newCollection(t)
	h := mustAcquire(t, newLease(t, shortConfig(coll, "a")))
	ended := startRun(t, h)
	off := failCommand(t, app, "alwaysOn", failingWrites())
	b := mustAcquire(t, newLease(t, shortConfig(secondClient(t, coll), "b")))
	if h.Valid() {
		t.Error("two valid leases at once")
	}

	select {
	case err := <-ended:
		t.Errorf("lost before the document was read: %v", err)
	default:
	}

	off()
	if err := receiveWithin(t, ended, "the loss"); !errors.Is(err, ErrLeaseLost) {
		t.Errorf("Run returned %v", err)
	}
	if cause := context.Cause(h.Context()); !errors.Is(cause, ErrLeaseLost) {
		t.Errorf("cause of the context is %v, want ErrLeaseLost", cause)
	}
	if h.Valid() || h.Save(t.Context(), Update{}) == nil {
		t.Error("a lost lease is still valid")
	}
	if err := b.Release(t.Context(), nil); err != nil {
		t.Error(err)
	}
}

func TestN02_ADeletedDocumentIsALoss(t *testing.T) {
	t.Parallel()
	coll, _ := newCollection(t)
	h := mustAcquire(t, newLease(t, shortConfig(coll, "a")))
	ended := startRun(t, h)
	if _, err := coll.DeleteOne(t.Context(), bson.D{{Key: "_id", Value: slotID}}); err != nil {
		t.Fatal(err)
	}
	if err := receiveWithin(t, ended, "the loss"); !errors.Is(err, ErrLeaseLost) || !errors.Is(err, errVanished) {
		t.Errorf("Run returned %v", err)
	}
}

func TestN02_TheDeadlineCountsFromBeforeTheSendingAndSeesASuspendedMachine(t *testing.T) {
	t.Parallel()
	coll, app := newCollection(t)
	cfg := shortConfig(coll, "a")
	cfg.TTL = 10 * time.Second

	const slow = 2600 * time.Millisecond
	l := newLease(t, cfg)
	var jump atomic.Int64
	l.clock = func() time.Duration { return BootClock() + time.Duration(jump.Load()) }
	h := mustAcquire(t, l)
	if !h.Valid() {
		t.Fatal("a fresh lease is not valid")
	}

	// The machine was suspended, which the monotonic clock does not show.
	jump.Store(int64(l.cfg.TTL))
	if h.Valid() {
		t.Error("valid after a suspension that is longer than the lease")
	}
	if err := h.Save(t.Context(), Update{}); err != nil || !h.Valid() {
		t.Errorf("after a renewal: %v", err)
	}

	failCommand(t, app, bson.D{{Key: "times", Value: 1}}, bson.D{
		{Key: "failCommands", Value: bson.A{"findAndModify"}},
		{Key: "blockConnection", Value: true},
		{Key: "blockTimeMS", Value: slow.Milliseconds()},
	})
	start := l.clock()
	if err := h.Save(t.Context(), Update{}); err != nil {
		t.Fatal(err)
	}

	responded := l.clock()
	if late := time.Duration(h.deadline.Load()) - start - l.cfg.TTL; late > 0 {
		t.Errorf("the deadline is %v later than the lease that began when the slow renewal was sent", late)
	}

	sent := time.Duration(h.lastWrite.Load())
	if responded-sent < slow {
		t.Errorf("it counts from %v before the response, which took %v", responded-sent, slow)
	}
	if g := l.cfg.TTL - (time.Duration(h.deadline.Load()) - sent); g != guardTime(l.cfg.TTL) {
		t.Errorf("guard %v", g)
	}
}

func BenchmarkValid(b *testing.B) {
	h := &Held{lease: &Lease{clock: BootClock}}
	h.deadline.Store(1 << 62)
	for b.Loop() {
		if !h.Valid() {
			b.Fatal("not valid")
		}
	}
}
