package stacktest

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/gofrs/flock"

	"github.com/outrelay/outrelay/internal/lab/devstack"
)

// Own starts a stack that the test may break, and stops it when the test ends. Only a few tests on this
// machine have such a stack concurrently. The others wait here, so a test that calls Own must not depend on
// another test that calls it. Own never uses servers named by the environment.
func Own(tb testing.TB, options devstack.Options) *devstack.Stack {
	tb.Helper()
	options.Env = false
	LockMachine(tb)
	if options.Progress == nil {
		options.Progress = func(progress devstack.Progress) { tb.Log(progress) }
	}
	stack, err := devstack.Start(tb.Context(), options)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(stack.Stop)
	return stack
}

// ownStacks is how many tests may have separate servers concurrently. These tests wait more for timeouts than for the
// processor, but each starts a JVM.
const ownStacks = 4

// LockMachine blocks until fewer than ownStacks other tests on this machine have separate servers, and holds
// its place until the test ends. Tests that start servers without Own call it.
func LockMachine(tb testing.TB) {
	tb.Helper()
	dir := devstack.CacheDir()
	if err := os.MkdirAll(dir, 0o755); err != nil {
		tb.Fatal(err)
	}

	ctx := tb.Context()
	if limited, ok := tb.(interface{ Deadline() (time.Time, bool) }); ok {
		if moment, ok := limited.Deadline(); ok {
			var cancel context.CancelFunc
			ctx, cancel = context.WithDeadline(ctx, moment.Add(-5*time.Second))
			defer cancel()
		}
	}

	again := time.NewTicker(100 * time.Millisecond)
	defer again.Stop()
	for i := 0; ; i++ {
		lock := flock.New(filepath.Join(dir, fmt.Sprintf("own%d.lock", i%ownStacks)))
		ok, err := lock.TryLock()
		if err != nil {
			tb.Fatalf("locking a place for separate servers (%s): %v", lock.Path(), err)
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
			tb.Fatalf("waiting for the servers of other tests to end (%s): %v", lock.Path(), context.Cause(ctx))
		}
	}
}
