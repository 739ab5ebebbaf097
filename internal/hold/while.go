package hold

import (
	"context"
	"sync"
)

// While runs fn, and beside it keep, which renews the lease until its context ends. If keep returns an error, the lease is
// lost: the context of fn ends with that as its cause, and it is returned beside the error of fn. Both have ended when
// While returns, and also when fn panics.
func While(ctx context.Context, keep, fn func(context.Context) error) (lost, err error) {
	inner, cancel := context.WithCancelCause(ctx)
	keeping, stop := context.WithCancel(ctx)
	var wg sync.WaitGroup
	wg.Go(func() {
		if lost = keep(keeping); lost != nil {
			cancel(lost)
		}
	})
	err = func() error {
		defer cancel(nil)
		defer wg.Wait()
		defer stop() // also when fn panics
		return fn(inner)
	}()
	return lost, err
}
