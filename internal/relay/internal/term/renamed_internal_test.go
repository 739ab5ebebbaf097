package term

import (
	"testing"
	"time"

	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/relay/readiness"
)

// TestN27_ASweepOfARenamedCollectionGivesSignsOfLife: its first response may take minutes where an index is missing. Without a
// sign of life the monitor would give the lease away, to an owner that finds the same rename.
func TestN27_ASweepOfARenamedCollectionGivesSignsOfLife(t *testing.T) {
	t.Parallel()
	var c readiness.Calls
	var w idleTimer
	now := time.Now()
	w.idleFor(c.Ticks.Load(), now)
	stop := c.KeepTicking(t.Context(), time.Millisecond)
	stacktest.Eventually(t, "a tick is counted", func() bool { return c.Ticks.Load() > 0 })
	if idle := w.idleFor(c.Ticks.Load(), now.Add(stalledAfter+time.Second)); idle > 0 {
		t.Errorf("the monitor saw nothing for %s", idle)
	}
	stop() // and leaves no goroutine
}
