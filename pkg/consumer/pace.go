package consumer

import (
	"fmt"
	"sync"
	"time"
)

// targetDuration is how long the messages of one transaction may take together. A transaction that
// takes twice as long is given up between two messages: a server aborts a transaction that stays
// open for too long, by default after a minute.
const targetDuration = 5 * time.Second

// pace decides how many messages of a handler share a transaction. The size starts at one and
// doubles with each committed transaction. After a transaction that was too large, the size doubles
// only up to half of it, and then grows by one.
type pace struct {
	mu            sync.Mutex
	perMessage    time.Duration // moving average of the time per message
	size          int           // 0 is 1
	doublingLimit int           // 0 is none
}

// batchSize returns how many messages the next transaction may have, at most limit.
func (c *pace) batchSize(limit int) int {
	c.mu.Lock()
	defer c.mu.Unlock()

	n := min(limit, max(c.size, 1))
	if c.perMessage > 0 {
		n = min(n, int(targetDuration/c.perMessage))
	}
	return max(n, 1)
}

// recordDuration records how long n handled messages took.
func (c *pace) recordDuration(took time.Duration, n int) {
	c.mu.Lock()
	defer c.mu.Unlock()

	perMessage := took / time.Duration(max(n, 1))
	if c.perMessage > 0 {
		perMessage = c.perMessage + (perMessage-c.perMessage)/8
	}
	c.perMessage = max(perMessage, 1)
}

// growAfter increases the size after the commit of a transaction of n messages. A transaction
// smaller than the size proves nothing and changes nothing.
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

// shrinkAfter halves the size after a transaction of n messages that could not be committed. slow
// is nil unless the transaction was given up for its duration. It then has the number of handled
// messages.
func (c *pace) shrinkAfter(n int, slow *overrunError) {
	c.mu.Lock()
	defer c.mu.Unlock()

	c.size = max(n/2, 1)
	c.doublingLimit = c.size
	if slow != nil && slow.handled > 0 {
		c.perMessage = slow.after / time.Duration(slow.handled)
	}
}

// overrunError reports that a transaction of several messages was given up because it took too
// long. It carries no error label, so that the driver does not run the transaction again as it is.
type overrunError struct {
	after   time.Duration
	handled int
	err     error // of the run before, if that is why the transaction took so long
}

func (e *overrunError) Error() string {
	text := fmt.Sprintf("a transaction was given up after %v: fewer messages are tried", e.after)
	if e.err != nil {
		text += ": " + e.err.Error()
	}
	return text
}
