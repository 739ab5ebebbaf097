package lease

import (
	"context"
	"testing"
	"time"

	"github.com/outrelay/outrelay/internal/devstack/stacktest"
)

// TestClientClocksDoNotMatter lets processes judge by clocks that are ten minutes apart: none takes a lease early, none
// keeps one for ever. Nothing but the server's time is compared with the document.
func TestClientClocksDoNotMatter(t *testing.T) {
	t.Parallel()
	for _, skew := range []time.Duration{-10 * time.Minute, 10 * time.Minute} {
		t.Run(skew.String(), func(t *testing.T) {
			t.Parallel()
			coll, _ := newCollection(t)
			cfg := shortConfig(coll, "a")
			cfg.TTL = 4 * time.Second // an owner that is not run for a second keeps it
			owner := newLease(t, cfg)
			held := mustAcquire(t, owner)
			startRun(t, held)

			cfg.Node = "b"
			standby := newLease(t, cfg)
			standby.clock = func() time.Duration { return bootClock() + skew }
			standby.holdOff.Store(int64(standby.clock()))
			early, cancel := context.WithTimeout(t.Context(), 2*owner.cfg.TTL)
			defer cancel()
			if h, err := standby.Acquire(early); err == nil {
				t.Fatalf("a standby whose clock is off by %v took a lease that is renewed: epoch %d", skew, h.Document().Epoch)
			}
			stacktest.Eventually(t, "the owner trusts its lease", held.Valid)
			ctx, stop := context.WithTimeout(t.Context(), patient)
			defer stop()
			if err := held.Release(ctx, Checkpoint{}); err != nil {
				t.Fatal(err)
			}
			next := mustAcquire(t, standby)
			if !next.Valid() || next.Document().Epoch != 2 {
				t.Fatalf("a clock that is off by %v keeps a free lease from its next owner", skew)
			}
			if err := next.Release(ctx, Checkpoint{}); err != nil {
				t.Fatal(err)
			}
		})
	}
}
