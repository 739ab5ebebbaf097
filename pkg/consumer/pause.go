package consumer

import (
	"container/list"
	"context"
	"sync"
	"time"
)

// pauseGate is the pause state of a consumer. A user pauses it until it is resumed, a policy until
// a given time.
type pauseGate struct {
	mu       sync.Mutex
	manual   bool // paused by Pause
	until    time.Time
	changed  chan struct{} // closed and replaced at each change; nil before the first
	notify   func(paused bool)
	notified bool // the last value passed to notify
}

// Pause stops reading. Messages in progress are finished. Messages that were read and not started
// are dropped from memory. Their offsets are not committed, and they are read again after Resume.
// The group continues without a rebalance. A consumer may be paused before it runs.
func (c *Consumer) Pause() { c.gate.update(func(g *pauseGate) { g.manual = true }) }

// Resume ends a pause, whatever its cause, and the suspensions of all handlers.
func (c *Consumer) Resume() {
	for _, r := range c.reg.snapshot().all {
		r.suspension.resume()
	}
	c.gate.update(func(g *pauseGate) { g.manual, g.until = false, time.Time{} })
}

// pauseFor pauses for d. It does not shorten a longer pause.
func (g *pauseGate) pauseFor(d time.Duration) {
	until := time.Now().Add(d)
	g.update(func(g *pauseGate) {
		if until.After(g.until) {
			g.until = until
		}
	})
}

// pauseFor pauses the consumer for d, or until Resume if d is UntilResumed.
func (c *Consumer) pauseFor(d time.Duration) {
	if d == UntilResumed {
		c.Pause()
		return
	}
	c.gate.pauseFor(d)
}

// keptAttempts keeps the attempts of messages that paused the consumer. A pause drops the messages
// from memory, and their attempts must continue to count afterwards.
type keptAttempts struct {
	mu        sync.Mutex
	oldest    list.List // of keptMessage, the oldest first
	byMessage map[keptAttemptsKey]*list.Element
}

type keptAttemptsKey struct {
	tp      TopicPartition
	offset  int64
	handler string
}

// keptMessage is a message with its kept attempts.
type keptMessage struct {
	key      keptAttemptsKey
	attempts Attempts
}

// maxKeptAttempts bounds the kept attempts. Messages whose partitions moved to another member never
// come back.
const maxKeptAttempts = 10_000

// keepAttempts stores the attempts of x until restoreAttempts is called for the same message. When
// the limit is reached, it drops the oldest that are stored.
func (r *run) keepAttempts(t *track, x task) {
	k := &r.kept
	k.mu.Lock()
	defer k.mu.Unlock()

	key := keptAttemptsKey{t.p.tp, x.entry.offset, t.reg.name}
	k.removeLocked(key)
	if k.oldest.Len() >= maxKeptAttempts {
		k.removeLocked(k.oldest.Front().Value.(keptMessage).key)
	}

	if k.byMessage == nil {
		k.byMessage = map[keptAttemptsKey]*list.Element{}
	}
	k.byMessage[key] = k.oldest.PushBack(keptMessage{key, x.share.attempts})
}

// restoreAttempts gives x the attempts that keepAttempts stored for its message, if any.
func (r *run) restoreAttempts(t *track, x task) {
	r.kept.mu.Lock()
	defer r.kept.mu.Unlock()

	if at, ok := r.kept.removeLocked(keptAttemptsKey{t.p.tp, x.entry.offset, t.reg.name}); ok {
		x.share.attempts = at
	}
}

// removeLocked removes the attempts of a message and returns them. ok reports whether there were any.
func (k *keptAttempts) removeLocked(key keptAttemptsKey) (at Attempts, ok bool) {
	e, ok := k.byMessage[key]
	if !ok {
		return at, false
	}

	delete(k.byMessage, key)
	return k.oldest.Remove(e).(keptMessage).attempts, true
}

// update changes the state with f, under the lock, and wakes all goroutines that wait for a change.
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

// notifyLocked calls notify if the state has changed since its last call.
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

// currentState reports whether the gate is closed and how long it stays closed without a change.
// left is 0 if there is no such time. changed is closed at the next change.
func (g *pauseGate) currentState() (closed bool, left time.Duration, changed <-chan struct{}) {
	g.mu.Lock()
	defer g.mu.Unlock()

	if g.changed == nil {
		g.changed = make(chan struct{})
	}
	closed = g.isClosedLocked()
	g.notifyLocked(closed)

	// Time has passed since the check above, and 0 would mean that the pause has no end.
	if closed && !g.manual {
		left = max(time.Until(g.until), 1)
	}
	return closed, left, g.changed
}

// waitOpen blocks until the gate is open. It returns the cause of ctx if ctx ends first.
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
