package lease

import (
	"context"
	"testing"
	"time"
)

// TestClientClocksDoNotMatter lets processes judge by clocks that are ten minutes apart: none takes a lease early, none
// keeps one for ever. Nothing but the server's time is compared with the document.
func TestClientClocksDoNotMatter(t *testing.T) {
	t.Parallel()
	for _, skew := range []time.Duration{-10 * time.Minute, 10 * time.Minute} {
		t.Run(skew.String(), func(t *testing.T) {
			t.Parallel()
			coll, _ := place(t)
			owner := newLease(t, config(coll, "a"))
			held := acquire(t, owner)
			run(t, held)

			standby := newLease(t, config(coll, "b"))
			standby.clock = func() time.Duration { return bootClock() + skew }
			standby.holdOff.Store(int64(standby.clock()))
			early, cancel := context.WithTimeout(t.Context(), 3*owner.cfg.TTL)
			defer cancel()
			if h, err := standby.Acquire(early); err == nil {
				t.Fatalf("a standby whose clock is off by %v took a lease that is renewed: epoch %d", skew, h.Document().Epoch)
			}
			if !held.Valid() {
				t.Fatal("the owner does not trust its lease")
			}
			ctx, stop := context.WithTimeout(t.Context(), 5*time.Second)
			defer stop()
			if err := held.Release(ctx, Checkpoint{}); err != nil {
				t.Fatal(err)
			}
			next := acquire(t, standby)
			if !next.Valid() || next.Document().Epoch != 2 {
				t.Fatalf("a clock that is off by %v keeps a free lease from its next owner", skew)
			}
			if err := next.Release(ctx, Checkpoint{}); err != nil {
				t.Fatal(err)
			}
		})
	}
}
