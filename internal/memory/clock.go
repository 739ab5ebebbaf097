package memory

import (
	"slices"
	"sync"
	"time"
)

// Clock provides the time for a DB and a Broker: for scheduled events, leases, retention and the
// timestamps of records.
type Clock interface {
	// Now returns the current time.
	Now() time.Time

	// At returns a channel that is closed at the time t. stop releases the resources if the channel
	// is not needed any more.
	At(t time.Time) (reached <-chan struct{}, stop func())
}

// ClockOption is the result of WithClock. It is an option for NewDB and NewBroker.
type ClockOption struct{ clock Clock }

// WithClock sets the clock. Defaults to the clock of the system.
func WithClock(c Clock) ClockOption { return ClockOption{c} }

func (o ClockOption) applyDB(d *DB) { d.clock = o.clock }

func (o ClockOption) applyBroker(b *Broker) { b.clock = o.clock }

// systemClock is the clock of the system.
type systemClock struct{}

func (systemClock) Now() time.Time { return time.Now() }

func (systemClock) At(t time.Time) (<-chan struct{}, func()) {
	reached := make(chan struct{})
	timer := time.AfterFunc(time.Until(t), func() { close(reached) })
	return reached, func() { timer.Stop() }
}

// ManualClock is a clock that changes only with Advance and Set. It is safe for concurrent use.
type ManualClock struct {
	mu     sync.Mutex
	now    time.Time
	alarms []*alarm // those in the future
}

// alarm is a channel to be closed at a time.
type alarm struct {
	at      time.Time
	reached chan struct{}
}

// NewManualClock returns a clock whose time is now.
func NewManualClock(now time.Time) *ManualClock { return &ManualClock{now: now} }

// Now returns the time of the clock.
func (c *ManualClock) Now() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.now
}

// At returns a channel that is closed when the clock reaches t: see Clock.
func (c *ManualClock) At(t time.Time) (<-chan struct{}, func()) {
	c.mu.Lock()
	defer c.mu.Unlock()

	a := &alarm{t, make(chan struct{})}
	if !t.After(c.now) {
		close(a.reached)
		return a.reached, func() {}
	}

	c.alarms = append(c.alarms, a)
	return a.reached, func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		c.alarms = slices.DeleteFunc(c.alarms, func(x *alarm) bool { return x == a })
	}
}

// Advance moves the clock forward by d.
func (c *ManualClock) Advance(d time.Duration) { c.Set(c.Now().Add(d)) }

// Set sets the clock. It closes the channels for this time and earlier ones.
func (c *ManualClock) Set(now time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()

	c.now = now
	c.alarms = slices.DeleteFunc(c.alarms, func(a *alarm) bool {
		if a.at.After(now) {
			return false
		}

		close(a.reached)
		return true
	})
}
