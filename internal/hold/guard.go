// Package hold is how one handler at a time works on something: a guard within this process, and a lease that is renewed
// while the handler runs.
package hold

import (
	"context"
	"sync"
)

// Guard lets one holder of an id at a time run in this process. It is no promise, as other processes know nothing of it.
// The zero value is ready.
type Guard struct {
	mu   sync.Mutex
	busy map[string]chan struct{} // closed when the holder is done
}

type guardKey struct{}

// Enter returns when nobody else holds id, or ok false at once if not to wait. Whoever holds one id already, by its
// context, is let in without waiting: two that nest the same two the other way round would wait for each other.
func (g *Guard) Enter(ctx context.Context, id string, wait bool) (inner context.Context, leave func(), ok bool, err error) {
	if ctx.Value(guardKey{}) != nil {
		return ctx, func() {}, true, nil
	}
	for {
		g.mu.Lock()
		other, busy := g.busy[id]
		if !busy {
			break
		}
		g.mu.Unlock()
		if !wait {
			return nil, nil, false, nil
		}
		select {
		case <-other:
		case <-ctx.Done():
			return nil, nil, false, context.Cause(ctx)
		}
	}
	defer g.mu.Unlock()
	if g.busy == nil {
		g.busy = make(map[string]chan struct{})
	}
	done := make(chan struct{})
	g.busy[id] = done
	return context.WithValue(ctx, guardKey{}, id), func() {
		g.mu.Lock()
		defer g.mu.Unlock()
		delete(g.busy, id)
		close(done)
	}, true, nil
}
