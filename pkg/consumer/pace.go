package consumer

import (
	"fmt"
	"sync"
	"time"
)

// span is how long the messages of one transaction may take together. A transaction that takes twice as long is given up
// between two messages: a server aborts one that is open for too long, by default after a minute.
const span = 5 * time.Second

// pace is how many messages of a handler share a transaction. It begins with one and doubles with each transaction that
// succeeds; once one was too large, half of it is the bound up to which it doubles, and above it grows by one.
type pace struct {
	mu    sync.Mutex
	perMessage  time.Duration // how long a message takes, as an average
	size  int           // 0 is 1
	doublingLimit int           // 0 is none
}

// batchSize is how many messages the next transaction may have.
func (c *pace) batchSize(limit int) int {
	c.mu.Lock()
	defer c.mu.Unlock()
	n := min(limit, max(c.size, 1))
	if c.perMessage > 0 {
		n = min(n, int(span/c.perMessage))
	}
	return max(n, 1)
}

// recordDuration takes note of how long handled messages took.
func (c *pace) recordDuration(d time.Duration, n int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	each := d / time.Duration(max(n, 1))
	if c.perMessage > 0 {
		each = c.perMessage + (each-c.perMessage)/8
	}
	c.perMessage = max(each, 1)
}

// growAfter lets the size grow after a transaction of n messages that was committed.
func (c *pace) growAfter(n int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case n < max(c.size, 1):
	case c.doublingLimit > 0 && 2*n > c.doublingLimit:
		c.size = min(n+1, maxBatch)
	default:
		c.size = min(2*n, maxBatch)
	}
}

// shrinkAfter halves the size after a transaction of n messages that could not be committed. slow says how many it handled
// before it was given up, if that was for its duration.
func (c *pace) shrinkAfter(n int, slow *overrunError) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.size = max(n/2, 1)
	c.doublingLimit = c.size
	if slow != nil && slow.handled > 0 {
		c.perMessage = slow.after / time.Duration(slow.handled)
	}
}

// overrunError says that a transaction of several messages was given up because it took too long. It has no label by which
// the driver would run it again as it is.
type overrunError struct {
	after   time.Duration
	handled int
	err     error // why the run before failed, if that is why it took so long
}

func (e *overrunError) Error() string {
	text := fmt.Sprintf("a transaction was given up after %v: fewer messages are tried", e.after)
	if e.err != nil {
		text += ": " + e.err.Error()
	}
	return text
}
