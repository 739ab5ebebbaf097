package lease

import (
	"context"
	"testing"
	"time"

	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
)

// TestClientClocksDoNotMatter gives the processes clocks that differ by ten minutes. No process acquires a
// lease early, and no process blocks it forever, because only the server's time is compared with the document.
func TestClientClocksDoNotMatter(t *testing.T) {
	t.Parallel()
	for _, skew := range []time.Duration{-10 * time.Minute, 10 * time.Minute} {
		t.Run(skew.String(), func(t *testing.T) {
			t.Parallel()
			coll, _ := newCollection(t)
			cfg := shortConfig(coll, "a")

			// The owner must keep the lease if it does not run for a second.
			cfg.TTL = 4 * time.Second
			owner := newLease(t, cfg)
			held := mustAcquire(t, owner)
			startRun(t, held)

			cfg.Node = "b"
			standby := newLease(t, cfg)
			standby.clock = func() time.Duration { return BootClock() + skew }
			standby.holdOff.Store(int64(standby.clock()))
			early, cancel := context.WithTimeout(t.Context(), 2*owner.cfg.TTL)
			defer cancel()
			if h, err := standby.Acquire(early); err == nil {
				t.Fatalf("a standby with a clock difference of %v acquired a renewed lease: epoch %d", skew, h.Document().Epoch)
			}

			stacktest.Eventually(t, "the owner trusts its lease", held.Valid)
			ctx, stop := context.WithTimeout(t.Context(), patient)
			defer stop()
			if err := held.Release(ctx, nil); err != nil {
				t.Fatal(err)
			}

			next := mustAcquire(t, standby)
			if !next.Valid() || next.Document().Epoch != 2 {
				t.Fatalf("with a clock difference of %v the next owner did not acquire a free lease", skew)
			}
			if err := next.Release(ctx, nil); err != nil {
				t.Fatal(err)
			}
		})
	}
}
