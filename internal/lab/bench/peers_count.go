package bench

import (
	"sync"
	"sync/atomic"
	"time"
)

// counted counts the arrivals of each event.
type counted struct {
	shots  atomic.Pointer[shots]
	failed func() error

	mu      sync.Mutex
	seen    []bool // by number
	gap     bool   // between the kill and the end of the measurement
	lastNew time.Time
	longest time.Duration // without a new event, in the gap
	repeats int           // in the gap
}

func newCounted(numbers int) *counted { return &counted{seen: make([]bool, numbers)} }

// recordArrival records an arrival from the topic.
func (c *counted) recordArrival(number int, arrivedAt time.Time, _ sender) {
	if shots := c.shots.Load(); shots != nil {
		shots.recordArrival(number, arrivedAt)
	}

	c.mu.Lock()
	defer c.mu.Unlock()
	for number >= len(c.seen) {
		c.seen = append(c.seen, make([]bool, len(c.seen)+1)...)
	}
	switch {
	case c.seen[number]:
		if c.gap {
			c.repeats++
		}
		return
	case c.gap:
		c.longest = max(c.longest, arrivedAt.Sub(c.lastNew))
	}
	c.seen[number] = true
	c.lastNew = arrivedAt
}

// beginGap begins to count repeats, and the time without new events.
func (c *counted) beginGap() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.gap = true
}

// endGap returns the longest time without a new event in milliseconds, and the number of repeats.
func (c *counted) endGap() (silenceMS float64, repeats int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.gap = false
	return round(float64(c.longest.Microseconds())/1000, 0), c.repeats
}
