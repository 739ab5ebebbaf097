package dispatch

import (
	"context"
	"sync"
)

// budget is N13: one all-or-nothing reservation for each envelope, so that what is read and not yet acked stays inside the
// configured bytes whatever the backlog or the broker does. An envelope larger than the whole share goes alone.
type budget struct {
	mu      sync.Mutex
	changed *sync.Cond
	share   int64 // what its user may take of the configured bytes
	used    int64
	waiting int // callers that are blocked
}

// reconcilerShare of the budget is kept for the reconciler, so that a full stream cannot starve retries.
const reconcilerShare = 4 // one in four

func newBudget(share int64) *budget {
	b := &budget{share: max(share, 1)}
	b.changed = sync.NewCond(&b.mu)
	return b
}

// fits reports whether n more bytes may be read now: they fit into the share, or nothing else is in use.
func (b *budget) fits(n int64) bool { return b.used+n <= b.share || b.used == 0 }

// reserve blocks until n bytes fit and ready() holds, or ctx ends. wait is called once, without the lock, before it blocks
// for the first time.
func (b *budget) reserve(ctx context.Context, n int64, ready func() bool, wait func()) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.fits(n) && ready() {
		b.used += n
		return nil
	}
	b.mu.Unlock()
	wait()
	stop := context.AfterFunc(ctx, b.wake)
	defer stop()
	b.mu.Lock()
	b.waiting++
	defer func() { b.waiting-- }()
	for !b.fits(n) || !ready() {
		if err := ctx.Err(); err != nil {
			return context.Cause(ctx)
		}
		b.changed.Wait()
	}
	b.used += n
	return nil
}

// release gives n bytes back.
func (b *budget) release(n int64) {
	b.mu.Lock()
	b.used = max(b.used-n, 0)
	b.mu.Unlock()
	b.changed.Broadcast()
}

func (b *budget) wake() {
	b.mu.Lock()
	b.mu.Unlock() //nolint:staticcheck // orders the wake-up after the check of a waiter
	b.changed.Broadcast()
}

func (b *budget) blocked() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.waiting > 0
}

func (b *budget) inUse() int64 {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.used
}
