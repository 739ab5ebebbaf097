package consumer

import (
	"context"
	"sync"
)

// pauseGate is the pause state of a consumer.
type pauseGate struct {
	mu      sync.Mutex
	paused  bool
	changed chan struct{} // closed and replaced at each change; nil before the first
	notify  func(paused bool)
}

// Pause stops reading. Messages in progress are finished. Messages that were read and not started
// are dropped from memory. Their offsets are not committed, and they are read again after Resume.
// The group continues without a rebalance. A consumer may be paused before it runs.
func (c *Consumer) Pause() { c.gate.set(true) }

// Resume ends Pause. Handlers that are suspended stay suspended: see ResumeHandler.
func (c *Consumer) Resume() { c.gate.set(false) }

// PauseHandler suspends the handler of that name in this process until ResumeHandler, and reports whether there is such a handler.
// Attempts in progress are finished. The messages of the handler wait in Kafka. If all other handlers have finished a message, it is
// set aside untried.
func (c *Consumer) PauseHandler(name string) bool {
	registration := c.reg.find(name)
	if registration != nil {
		registration.suspension.suspendFor(untilResumed)
	}
	return registration != nil
}

// ResumeHandler ends the suspension of the handler of that name, whatever has suspended it, and reports whether there is such a
// handler.
func (c *Consumer) ResumeHandler(name string) bool {
	registration := c.reg.find(name)
	if registration != nil {
		registration.suspension.resume()
	}
	return registration != nil
}

// set changes the state and wakes all goroutines that wait for a change.
func (g *pauseGate) set(paused bool) {
	g.mu.Lock()
	isNew := paused != g.paused
	g.paused = paused
	if g.changed != nil {
		close(g.changed)
	}
	g.changed = make(chan struct{})
	g.mu.Unlock()

	// notify calls code of the user, so it is called without the lock.
	if isNew && g.notify != nil {
		g.notify(paused)
	}
}

func (g *pauseGate) isPaused() bool {
	paused, _ := g.currentState()
	return paused
}

// currentState reports whether the gate is closed. changed is closed at the next change.
func (g *pauseGate) currentState() (paused bool, changed <-chan struct{}) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.changed == nil {
		g.changed = make(chan struct{})
	}
	return g.paused, g.changed
}

// waitOpen blocks until the gate is open. It returns the cause of ctx if ctx ends first.
func (g *pauseGate) waitOpen(ctx context.Context) error {
	for {
		paused, changed := g.currentState()
		if !paused {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}
