package pipeline

import (
	"context"
	"slices"
	"sync"
	"sync/atomic"
)

// budget is N13: one all-or-nothing reservation for each envelope. It keeps the bytes that are
// read and not yet acked within the configured limit, for any backlog and any state of the
// broker. An envelope that is larger than the whole share goes alone.
type budget struct {
	mu      sync.Mutex
	changed *sync.Cond
	share   int64 // bytes that this budget may use
	used    int64
	waiting int           // callers that are blocked
	shared  *sharedBudget // of all budgets of the process
}

// sharedBudget counts the use of all budgets of a process. If a share becomes smaller, that
// limits new reservations at once, but not the bytes in use. Until those are released, the
// shared limit restricts the other budgets.
type sharedBudget struct {
	limit         int64
	used, waiting atomic.Int64
}

// reconcilerShare is the part of the budget that is kept for the reconciler, one in four, so
// that a full stream cannot starve retries.
const reconcilerShare = 4

func newBudget(shared *sharedBudget) *budget {
	budget := &budget{share: shared.limit, shared: shared}
	budget.changed = sync.NewCond(&budget.mu)
	return budget
}

// fitsLocked reports whether n more bytes may be reserved now. They must fit into the share,
// and, with the use of the other budgets, into the shared limit. If this budget is empty, any
// number fits.
func (b *budget) fitsLocked(n int64) bool {
	if n == 0 || b.used == 0 {
		return true
	}
	return b.used+n <= b.share && b.shared.used.Load()+n <= b.shared.limit
}

// addUsedLocked counts n bytes as used. Two budgets that reserve at the same moment may exceed
// the shared limit by one envelope.
func (b *budget) addUsedLocked(n int64) {
	b.used += n
	b.shared.used.Add(n)
}

// reserve reserves n bytes. It blocks until they fit and ready returns true, and returns the
// cause of ctx if ctx ends first. ready is called under the lock. Before reserve blocks for the
// first time, it calls beforeBlock once, without the lock.
func (b *budget) reserve(ctx context.Context, n int64, ready func() bool, beforeBlock func()) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.fitsLocked(n) && ready() {
		b.addUsedLocked(n)
		return nil
	}

	b.mu.Unlock()
	beforeBlock()
	stop := context.AfterFunc(ctx, b.wakeWaiters)
	defer stop()
	b.mu.Lock()

	b.waiting++
	defer func() { b.waiting-- }()

	// The waiter is counted before it checks the use of the other budgets. Each of them that
	// releases bytes after the check then sees it.
	b.shared.waiting.Add(1)
	defer b.shared.waiting.Add(-1)

	for !b.fitsLocked(n) || !ready() {
		if err := ctx.Err(); err != nil {
			return context.Cause(ctx)
		}
		b.changed.Wait()
	}
	b.addUsedLocked(n)
	return nil
}

// release returns n bytes, and reports whether callers of any budget of the process may be
// waiting for them.
func (b *budget) release(n int64) (waiting bool) {
	b.mu.Lock()
	// The dispatcher may have left the pool, which has taken everything back.
	n = min(n, b.used)
	b.used -= n
	b.shared.used.Add(-n)
	waiting = b.shared.waiting.Load() > 0
	b.mu.Unlock()

	b.changed.Broadcast()
	return waiting
}

// setShare changes the share.
func (b *budget) setShare(share int64) {
	b.mu.Lock()
	b.share = max(share, 1)
	b.mu.Unlock()

	b.changed.Broadcast()
}

// releaseAll returns all bytes that are in use.
func (b *budget) releaseAll() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.shared.used.Add(-b.used)
	b.used = 0
}

// wakeWaiters makes blocked callers check their condition again.
func (b *budget) wakeWaiters() {
	b.mu.Lock()
	b.mu.Unlock() //nolint:staticcheck // orders the wake-up after the check of a waiter
	b.changed.Broadcast()
}

// hasWaiters reports whether a caller of reserve is blocked.
func (b *budget) hasWaiters() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.waiting > 0
}

// inUse returns the bytes that are reserved.
func (b *budget) inUse() int64 {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.used
}

// currentShare returns the share.
func (b *budget) currentShare() int64 {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.share
}

// Pool is the memory that the resolvers of one process share (N28). The slots of a watcher
// that the process runs have equal parts of it, and a single slot has all. The pool never holds
// more than its bytes and one envelope of each, even while the parts change.
type Pool struct {
	bytes   int64
	tickets int
	stream  sharedBudget
	side    sharedBudget

	mu      sync.Mutex
	members []*Resolver
}

// minTickets is the minimum of events that each member may have above the resolved position.
const minTickets = 1000

// NewPool returns a pool of bytes and tickets.
func NewPool(bytes int64, tickets int) *Pool {
	pool := &Pool{bytes: max(bytes, reconcilerShare), tickets: tickets}
	pool.side.limit = pool.bytes / reconcilerShare
	pool.stream.limit = pool.bytes - pool.side.limit
	return pool
}

// addMember gives resolver a part of the pool. The parts of the other members become smaller.
func (p *Pool) addMember(resolver *Resolver) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.members = append(p.members, resolver)
	p.divideLocked()
}

// removeMember divides the part of resolver among the other members. It does nothing if resolver is not a
// member.
func (p *Pool) removeMember(resolver *Resolver) {
	p.mu.Lock()
	defer p.mu.Unlock()
	i := slices.Index(p.members, resolver)
	if i < 0 {
		return
	}

	resolver.budget.releaseAll()
	resolver.sideBudget.releaseAll()
	p.members = slices.Delete(p.members, i, i+1)
	p.divideLocked()
}

// divideLocked divides the pool equally among its members. It takes the locks of their budgets
// under the lock of the pool. The reverse order is never used.
func (p *Pool) divideLocked() {
	n := int64(len(p.members))
	for _, d := range p.members {
		d.maxTickets.Store(int64(max(p.tickets/int(n), min(p.tickets, minTickets))))
		d.sideBudget.setShare(p.side.limit / n)
		d.budget.setShare(p.stream.limit / n)
	}
}

// wakeMembers makes the blocked callers of all members check their condition again.
func (p *Pool) wakeMembers() {
	p.mu.Lock()
	members := slices.Clone(p.members)
	p.mu.Unlock()

	for _, d := range members {
		d.budget.wakeWaiters()
		d.sideBudget.wakeWaiters()
	}
}
