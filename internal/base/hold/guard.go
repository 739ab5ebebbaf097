// Package hold lets one handler at a time work on a resource. [Guard] excludes other handlers in this
// process. [RunWhile] renews a lease while a handler runs.
//
// Order: holders of one id that wait enter in no fixed order. Blocking: Enter blocks until the id is free or its
// context ends, and RunWhile until both functions have ended. Cost: one entry of a map for each id that is held.
package hold

import (
	"context"
	"sync"
)

// Guard admits one holder per id in this process. It does not exclude other processes. The zero value is
// ready to use.
type Guard struct {
	mu   sync.Mutex
	busy map[string]chan struct{} // closed when the holder is done
}

type guardKey struct{}

// Enter blocks until no other holder has id. If wait is false and id is taken, it returns at once with ok
// false. If ctx is the context of a holder of any id, Enter does not wait, because two holders that nest the
// same ids in opposite order would deadlock. The caller must call leave.
func (g *Guard) Enter(
	ctx context.Context, id string, wait bool,
) (inner context.Context, leave func(), ok bool, err error) {
	if ctx.Value(guardKey{}) != nil {
		return ctx, func() {}, true, nil
	}

	// The loop ends with g.mu locked.
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
	leave = func() {
		g.mu.Lock()
		defer g.mu.Unlock()
		delete(g.busy, id)
		close(done)
	}
	return context.WithValue(ctx, guardKey{}, id), leave, true, nil
}
