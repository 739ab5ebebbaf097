package consumer

import (
	"context"
	"sync"
	"time"
)

// gate is the pause of a consumer: by hand until it is resumed, by a policy until a time.
type gate struct {
	mu      sync.Mutex
	byHand  bool
	until   time.Time
	changed chan struct{} // closed and replaced at each change; nil before the first
	notify  func(paused bool)
	told    bool
}

// Pause stops reading. What is in flight is finished; what was read and did not begin is dropped from memory, its offsets
// are not committed, and it is read again after Resume. The group goes on without a rebalance. A consumer may be paused
// before it runs.
func (c *Consumer) Pause() { c.gate.set(func(g *gate) { g.byHand = true }) }

// Resume ends a pause, whatever its cause.
func (c *Consumer) Resume() { c.gate.set(func(g *gate) { g.byHand, g.until = false, time.Time{} }) }

// Paused reports whether the consumer is paused, by Pause or by a policy.
func (c *Consumer) Paused() bool { return c.gate.paused() }

// pauseFor pauses for that long; a longer pause that is there stays.
func (g *gate) pauseFor(d time.Duration) {
	until := time.Now().Add(d)
	g.set(func(g *gate) {
		if until.After(g.until) {
			g.until = until
		}
	})
}

// pauseFor pauses for that long, or until it is resumed by hand.
func (c *Consumer) pauseFor(d time.Duration) {
	if d == UntilResumed {
		c.Pause()
		return
	}
	c.gate.pauseFor(d)
}

// kept is the attempts of messages that paused the consumer: it forgets what it read, and is to go on counting.
type kept struct {
	mu   sync.Mutex
	list map[keptKey]Attempts
}

type keptKey struct {
	tp      TopicPartition
	offset  int64
	handler string
}

// maxKept bounds what is kept of messages that never come back: their partitions are another member's now.
const maxKept = 10_000

func (r *run) remember(t *track, x task) {
	r.kept.mu.Lock()
	defer r.kept.mu.Unlock()
	if r.kept.list == nil || len(r.kept.list) >= maxKept {
		r.kept.list = map[keptKey]Attempts{}
	}
	r.kept.list[keptKey{t.p.tp, x.entry.offset, t.reg.name}] = x.part.at
}

func (r *run) recall(t *track, x task) {
	r.kept.mu.Lock()
	defer r.kept.mu.Unlock()
	key := keptKey{t.p.tp, x.entry.offset, t.reg.name}
	if at, ok := r.kept.list[key]; ok {
		x.part.at = at
		delete(r.kept.list, key)
	}
}

func (g *gate) set(f func(g *gate)) {
	g.mu.Lock()
	defer g.mu.Unlock()
	f(g)
	if g.changed != nil {
		close(g.changed)
	}
	g.changed = make(chan struct{})
	g.tell(g.closed())
}

// tell notifies of a change. The lock is held.
func (g *gate) tell(paused bool) {
	if paused != g.told && g.notify != nil {
		g.told = paused
		g.notify(paused)
	}
}

func (g *gate) closed() bool { return g.byHand || time.Now().Before(g.until) }

func (g *gate) paused() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.closed()
}

// state is whether the gate is closed, how long at least unless it changes (0: for ever), and what tells of a change.
func (g *gate) state() (closed bool, left time.Duration, changed <-chan struct{}) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.changed == nil {
		g.changed = make(chan struct{})
	}
	closed = g.closed()
	g.tell(closed)
	if closed && !g.byHand {
		left = max(time.Until(g.until), 1) // 0 is for ever, and the time goes on
	}
	return closed, left, g.changed
}

// wait returns when the gate is open, or ctx ends.
func (g *gate) wait(ctx context.Context) error {
	for {
		closed, left, changed := g.state()
		if !closed {
			return nil
		}
		var timer <-chan time.Time
		if left > 0 {
			t := time.NewTimer(left)
			defer t.Stop()
			timer = t.C
		}
		select {
		case <-changed:
		case <-timer:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}
