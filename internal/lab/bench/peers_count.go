package bench

import (
	"fmt"
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
	early   int           // repeats before it
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
		} else {
			c.early++
		}
		return
	case c.gap:
		c.longest = max(c.longest, arrivedAt.Sub(c.lastNew))
	}
	c.seen[number] = true
	c.lastNew = arrivedAt
}

// checkDrain returns an error if one of the first n events is missing, or if an event has arrived twice. The drain is measured by the
// number of records, so a repeat would have ended it before its last event.
func (c *counted) checkDrain(n int) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	missing := 0
	for number := range n {
		if number >= len(c.seen) || !c.seen[number] {
			missing++
		}
	}

	if missing+c.early > 0 {
		return fmt.Errorf("the drain is no measurement: %d of %d events did not arrive, and %d were repeated", missing, n, c.early)
	}
	return nil
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
