package consumer

import (
	"context"
	"sync"
	"time"
)

// pauseGate is the pause of a consumer: by hand until it is resumed, by a policy until a time.
type pauseGate struct {
	mu      sync.Mutex
	manual  bool
	until   time.Time
	changed chan struct{} // closed and replaced at each change; nil before the first
	notify  func(paused bool)
	notified    bool
}

// Pause stops reading. What is in flight is finished; what was read and did not begin is dropped from memory, its offsets
// are not committed, and it is read again after Resume. The group goes on without a rebalance. A consumer may be paused
// before it runs.
func (c *Consumer) Pause() { c.gate.update(func(g *pauseGate) { g.manual = true }) }

// Resume ends a pause, whatever its cause.
func (c *Consumer) Resume() { c.gate.update(func(g *pauseGate) { g.manual, g.until = false, time.Time{} }) }

// Paused reports whether the consumer is paused, by Pause or by a policy.
func (c *Consumer) Paused() bool { return c.gate.isPaused() }

// pauseFor pauses for that long; a longer pause that is there stays.
func (g *pauseGate) pauseFor(d time.Duration) {
	until := time.Now().Add(d)
	g.update(func(g *pauseGate) {
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

// keptAttempts is the attempts of messages that paused the consumer: it forgets what it read, and is to go on counting.
type keptAttempts struct {
	mu   sync.Mutex
	byMessage map[keptAttemptsKey]Attempts
}

type keptAttemptsKey struct {
	tp      TopicPartition
	offset  int64
	handler string
}

// maxKeptAttempts bounds what is kept of messages that never come back: their partitions are another member's now.
const maxKeptAttempts = 10_000

func (r *run) keepAttempts(t *track, x task) {
	r.kept.mu.Lock()
	defer r.kept.mu.Unlock()
	if r.kept.byMessage == nil || len(r.kept.byMessage) >= maxKeptAttempts {
		r.kept.byMessage = map[keptAttemptsKey]Attempts{}
	}
	r.kept.byMessage[keptAttemptsKey{t.p.tp, x.entry.offset, t.reg.name}] = x.share.attempts
}

func (r *run) restoreAttempts(t *track, x task) {
	r.kept.mu.Lock()
	defer r.kept.mu.Unlock()
	key := keptAttemptsKey{t.p.tp, x.entry.offset, t.reg.name}
	if at, ok := r.kept.byMessage[key]; ok {
		x.share.attempts = at
		delete(r.kept.byMessage, key)
	}
}

func (g *pauseGate) update(f func(g *pauseGate)) {
	g.mu.Lock()
	defer g.mu.Unlock()
	f(g)
	if g.changed != nil {
		close(g.changed)
	}
	g.changed = make(chan struct{})
	g.notifyLocked(g.isClosedLocked())
}

// notifyLocked notifies of a change. The lock is held.
func (g *pauseGate) notifyLocked(paused bool) {
	if paused != g.notified && g.notify != nil {
		g.notified = paused
		g.notify(paused)
	}
}

func (g *pauseGate) isClosedLocked() bool { return g.manual || time.Now().Before(g.until) }

func (g *pauseGate) isPaused() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.isClosedLocked()
}

// currentState is whether the gate is closed, how long at least unless it changes (0: for ever), and what tells of a change.
func (g *pauseGate) currentState() (closed bool, left time.Duration, changed <-chan struct{}) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.changed == nil {
		g.changed = make(chan struct{})
	}
	closed = g.isClosedLocked()
	g.notifyLocked(closed)
	if closed && !g.manual {
		left = max(time.Until(g.until), 1) // 0 is for ever, and the time goes on
	}
	return closed, left, g.changed
}

// waitOpen returns when the gate is open, or ctx ends.
func (g *pauseGate) waitOpen(ctx context.Context) error {
	for {
		closed, left, changed := g.currentState()
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
