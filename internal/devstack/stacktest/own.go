package stacktest

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/gofrs/flock"

	"github.com/outrelay/outrelay/internal/devstack"
)

// Own starts a stack that the test may break, and stops it when the test ends. Few tests on this
// machine have such a stack at a time: the others wait here, so a test that calls Own must not depend
// on another that does. The environment's servers are never taken.
func Own(tb testing.TB, o devstack.Options) *devstack.Stack {
	tb.Helper()
	o.Env = false
	LockMachine(tb)
	if o.Progress == nil {
		o.Progress = func(p devstack.Progress) { tb.Log(p) }
	}
	s, err := devstack.Start(tb.Context(), o)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(s.Stop)
	return s
}

// ownStacks is how many tests have servers of their own at a time: they wait for each other's time-outs more than for the
// processor, but each starts a JVM.
const ownStacks = 3

// LockMachine holds, until the test ends, one of the machine's few places for those who start servers of
// their own; for a test that starts them by itself.
func LockMachine(tb testing.TB) {
	tb.Helper()
	dir := devstack.CacheDir()
	if err := os.MkdirAll(dir, 0o755); err != nil {
		tb.Fatal(err)
	}
	ctx := tb.Context()
	if t, ok := tb.(interface{ Deadline() (time.Time, bool) }); ok {
		if d, ok := t.Deadline(); ok {
			var cancel context.CancelFunc
			ctx, cancel = context.WithDeadline(ctx, d.Add(-5*time.Second))
			defer cancel()
		}
	}
	again := time.NewTicker(100 * time.Millisecond)
	defer again.Stop()
	for i := 0; ; i++ {
		lock := flock.New(filepath.Join(dir, fmt.Sprintf("own%d.lock", i%ownStacks)))
		ok, err := lock.TryLock()
		if err != nil {
			tb.Fatalf("taking a place for servers of a test's own (%s): %v", lock.Path(), err)
		}
		if ok {
			tb.Cleanup(func() { _ = lock.Close() })
			return
		}
		_ = lock.Close()
		if i%ownStacks != ownStacks-1 {
			continue
		}
		select {
		case <-again.C:
		case <-ctx.Done():
			tb.Fatalf("waiting for other tests' servers to end (%s): %v", lock.Path(), context.Cause(ctx))
		}
	}
}
