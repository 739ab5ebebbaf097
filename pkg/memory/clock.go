package memory

import (
	"slices"
	"sync"
	"time"
)

// Clock is what a DB and a Broker go by: the time of scheduled events, of leases, of retention, of records.
type Clock interface {
	Now() time.Time
	// At returns a channel that is closed when the time has come, and a function that gives it up.
	At(t time.Time) (reached <-chan struct{}, stop func())
}

// ClockOption is what WithClock returns: an option of NewDB and of NewBroker.
type ClockOption struct{ clock Clock }

// WithClock sets the clock. Defaults to the system's.
func WithClock(c Clock) ClockOption { return ClockOption{c} }

func (o ClockOption) db(d *DB) { d.clock = o.clock }

func (o ClockOption) broker(b *Broker) { b.clock = o.clock }

type systemClock struct{}

func (systemClock) Now() time.Time { return time.Now() }

func (systemClock) At(t time.Time) (<-chan struct{}, func()) {
	reached := make(chan struct{})
	timer := time.AfterFunc(time.Until(t), func() { close(reached) })
	return reached, func() { timer.Stop() }
}

// ManualClock stands still until it is set. It is safe for concurrent use.
type ManualClock struct {
	mu    sync.Mutex
	now   time.Time
	alarm []*alarm
}

type alarm struct {
	at      time.Time
	reached chan struct{}
}

// NewManualClock is a clock that shows now.
func NewManualClock(now time.Time) *ManualClock { return &ManualClock{now: now} }

// Now is the time that was set last.
func (c *ManualClock) Now() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.now
}

// At is Clock's.
func (c *ManualClock) At(t time.Time) (<-chan struct{}, func()) {
	c.mu.Lock()
	defer c.mu.Unlock()
	a := &alarm{t, make(chan struct{})}
	if !t.After(c.now) {
		close(a.reached)
		return a.reached, func() {}
	}
	c.alarm = append(c.alarm, a)
	return a.reached, func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		c.alarm = slices.DeleteFunc(c.alarm, func(x *alarm) bool { return x == a })
	}
}

// Advance moves the clock on.
func (c *ManualClock) Advance(d time.Duration) { c.Set(c.Now().Add(d)) }

// Set sets the clock; what waits for that time or an earlier one goes on.
func (c *ManualClock) Set(now time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.now = now
	c.alarm = slices.DeleteFunc(c.alarm, func(a *alarm) bool {
		if a.at.After(now) {
			return false
		}
		close(a.reached)
		return true
	})
}
