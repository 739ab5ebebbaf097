package stacktest

import (
	"context"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/gofrs/flock"

	"github.com/outrelay/outrelay/internal/devstack"
)

// Own starts a stack that the test may break, and stops it when the test ends. One test on this
// machine has such a stack at a time: the others wait here, so a test that calls Own must not depend
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

// LockMachine holds, until the test ends, the machine's lock of those who start servers of their
// own; for a test that starts them by itself.
func LockMachine(tb testing.TB) {
	tb.Helper()
	dir := devstack.CacheDir()
	if err := os.MkdirAll(dir, 0o755); err != nil {
		tb.Fatal(err)
	}
	lock := flock.New(filepath.Join(dir, "own.lock"))
	ctx := tb.Context()
	if t, ok := tb.(interface{ Deadline() (time.Time, bool) }); ok {
		if d, ok := t.Deadline(); ok {
			var cancel context.CancelFunc
			ctx, cancel = context.WithDeadline(ctx, d.Add(-5*time.Second))
			defer cancel()
		}
	}
	if ok, err := lock.TryLockContext(ctx, 100*time.Millisecond); !ok {
		tb.Fatalf("waiting for another test's servers to end (%s): %v", lock.Path(), err)
	}
	tb.Cleanup(func() { _ = lock.Close() })
}
