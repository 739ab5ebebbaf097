package hold

import (
	"context"
	"sync"
)

// RunWhile runs fn and, concurrently, keep. keep renews the lease until its context ends. If keep returns an
// error, the lease is lost: the context of fn ends with this error as its cause, and While returns it as
// lost. Both functions have ended when While returns or fn panics.
func RunWhile(ctx context.Context, keep, fn func(context.Context) error) (lost, err error) {
	inner, cancel := context.WithCancelCause(ctx)
	keeping, stop := context.WithCancel(ctx)

	var wg sync.WaitGroup
	wg.Go(func() {
		if lost = keep(keeping); lost != nil {
			cancel(lost)
		}
	})

	// Deferred, because fn may panic. keep stops first, and the context of fn ends last.
	err = func() error {
		defer cancel(nil)
		defer wg.Wait()
		defer stop()
		return fn(inner)
	}()
	return lost, err
}
