package dispatch

import (
	"context"
	"slices"
	"sync"
	"sync/atomic"
)

// budget is N13: one all-or-nothing reservation for each envelope, so that what is read and not yet acked stays inside the
// configured bytes whatever the backlog or the broker does. An envelope larger than the whole share goes alone.
type budget struct {
	mu      sync.Mutex
	changed *sync.Cond
	share   int64 // what its user may take of the configured bytes
	used    int64
	waiting int           // callers that are blocked
	shared  *sharedBudget // of all that share them
}

// sharedBudget is what the budgets of a process use together. A share that became smaller binds at once what is reserved from then on, but
// not what is in use already; meanwhile this bounds the others.
type sharedBudget struct {
	limit         int64
	used, waiting atomic.Int64
}

// reconcilerShare of the budget is kept for the reconciler, so that a full stream cannot starve retries.
const reconcilerShare = 4 // one in four

func newBudget(of *sharedBudget) *budget {
	b := &budget{share: of.limit, shared: of}
	b.changed = sync.NewCond(&b.mu)
	return b
}

// fitsLocked reports whether n more bytes may be read now: they fit into the share, and with what others use into the whole, or nothing
// else is in use here.
func (b *budget) fitsLocked(n int64) bool {
	return n == 0 || b.used == 0 || b.used+n <= b.share && b.shared.used.Load()+n <= b.shared.limit
}

// addUsedLocked notes n bytes as used; two budgets that do so at the same moment may pass the whole by one envelope.
func (b *budget) addUsedLocked(n int64) {
	b.used += n
	b.shared.used.Add(n)
}

// reserve blocks until n bytes fit and ready() holds, or ctx ends. wait is called once, without the lock, before it blocks
// for the first time.
func (b *budget) reserve(ctx context.Context, n int64, ready func() bool, wait func()) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.fitsLocked(n) && ready() {
		b.addUsedLocked(n)
		return nil
	}
	b.mu.Unlock()
	wait()
	stop := context.AfterFunc(ctx, b.wakeWaiters)
	defer stop()
	b.mu.Lock()
	b.waiting++
	defer func() { b.waiting-- }()
	b.shared.waiting.Add(1) // before the look at what others use, so that none of them misses it
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

// release gives n bytes back, and reports whether somebody else may wait for them.
func (b *budget) release(n int64) (others bool) {
	b.mu.Lock()
	n = min(n, b.used)
	b.used -= n
	b.shared.used.Add(-n)
	others = b.shared.waiting.Load() > 0
	b.mu.Unlock()
	b.changed.Broadcast()
	return others
}

// setShare changes the share.
func (b *budget) setShare(share int64) {
	b.mu.Lock()
	b.share = max(share, 1)
	b.mu.Unlock()
	b.changed.Broadcast()
}

// releaseAll gives back all that is in use.
func (b *budget) releaseAll() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.shared.used.Add(-b.used)
	b.used = 0
}

func (b *budget) wakeWaiters() {
	b.mu.Lock()
	b.mu.Unlock() //nolint:staticcheck // orders the wake-up after the check of a waiter
	b.changed.Broadcast()
}

func (b *budget) hasWaiters() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.waiting > 0
}

func (b *budget) inUse() int64 {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.used
}

func (b *budget) currentShare() int64 {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.share
}

// Pool is the memory that the dispatchers of one process share (N28): as many of a watcher's slots as the process runs have equal
// parts of it, one alone has all. It never holds more than its bytes, and one envelope of each dispatcher, also while parts change.
type Pool struct {
	bytes   int64
	tickets int
	stream  sharedBudget
	side    sharedBudget

	mu      sync.Mutex
	members []*Dispatcher
}

// minTickets is what each member may have above the watermark at least.
const minTickets = 1000

// NewPool makes a pool of that many bytes and tickets.
func NewPool(bytes int64, tickets int) *Pool {
	p := &Pool{bytes: max(bytes, reconcilerShare), tickets: tickets}
	p.side.limit = p.bytes / reconcilerShare
	p.stream.limit = p.bytes - p.side.limit
	return p
}

// addMember gives d a part, and takes it from the others.
func (p *Pool) addMember(d *Dispatcher) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.members = append(p.members, d)
	p.divideLocked()
}

// removeMember gives the part of d to the others.
func (p *Pool) removeMember(d *Dispatcher) {
	p.mu.Lock()
	defer p.mu.Unlock()
	i := slices.Index(p.members, d)
	if i < 0 {
		return
	}
	d.budget.releaseAll()
	d.sideBudget.releaseAll()
	p.members = slices.Delete(p.members, i, i+1)
	p.divideLocked()
}

// divideLocked is called with the lock held. That of a member's budget is taken under it, never the other way round.
func (p *Pool) divideLocked() {
	n := int64(len(p.members))
	for _, d := range p.members {
		d.maxTickets.Store(int64(max(p.tickets/int(n), min(p.tickets, minTickets))))
		d.sideBudget.setShare(p.side.limit / n)
		d.budget.setShare(p.stream.limit / n)
	}
}

// wakeMembers has the members look again at what they wait for.
func (p *Pool) wakeMembers() {
	p.mu.Lock()
	members := slices.Clone(p.members)
	p.mu.Unlock()
	for _, d := range members {
		d.budget.wakeWaiters()
		d.sideBudget.wakeWaiters()
	}
}
