package inbox

import (
	"context"
	"sync"
)

// guard lets one handling of an identity at a time run in this process. It saves the second of two the write conflict; it
// is no promise, as other processes know nothing of it.
type guard struct {
	mu   sync.Mutex
	busy map[string]chan struct{} // closed when the holder is done
}

type guardKey struct{}

// enter returns when nobody else handles id, or ok false at once if not to wait. Whoever holds one identity already, by
// its context, is let in without waiting: two that nest the same two the other way round would wait for each other.
func (g *guard) enter(ctx context.Context, id string, wait bool) (inner context.Context, leave func(), ok bool, err error) {
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
