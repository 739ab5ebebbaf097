package deadletter

import (
	"context"
	"time"

	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/retry"
)

// Bounds of the pace.
const (
	initialPartSize = 250
	minPartSize     = 25
	fastPart        = 100 * time.Millisecond // after a faster part, the next one may be larger
	slowPart        = 300 * time.Millisecond // after a slower part, the next one is smaller
	maxPause        = 200 * time.Millisecond
)

// pace adapts the number of letters in a transaction to the speed of the server. The owner cannot
// renew its lease during a fenced transaction, and a transaction of the owner that takes longer
// than its lease never commits. So a part is as large as the server can write in a fraction of a
// second.
type pace struct {
	partSize int

	// The last part that was too slow, and the size below which parts are not faster: a server that is loaded or far away
	// takes most of the time for each transaction, and not for its letters.
	slowLetters int
	slowTook    time.Duration
	least       int
}

func newPace() *pace { return &pace{partSize: initialPartSize} }

// recordDuration adapts the part size after a part with the given number of letters took d.
func (p *pace) recordDuration(d time.Duration, letters int) {
	switch {
	case d <= slowPart:

	// The smaller part took about as long as the larger one before.
	case letters < p.slowLetters && 4*d > 3*p.slowTook:
		p.least, p.partSize = p.slowLetters, p.slowLetters

	case letters > p.least || d > 2*p.slowTook:
		p.slowLetters, p.slowTook, p.least = letters, d, 0
		p.partSize = max(min(p.partSize, letters)/2, min(p.partSize, minPartSize))

	}

	// A part that its bytes kept small shows nothing about larger parts.
	if d < fastPart && letters >= p.partSize {
		p.partSize = min(p.partSize*2, mongodb.MaxDocuments)
	}
}

// recordTimeout reduces the part size after a part with the given number of letters did not commit
// in time.
func (p *pace) recordTimeout(letters int) { *p = pace{partSize: max(letters/4, 1)} }

// yieldToOwner pauses between two parts, so that the owner can renew its lease. took is the
// duration of the last part.
func yieldToOwner(ctx context.Context, took time.Duration) error {
	return retry.Sleep(ctx, min(10*time.Millisecond+took/4, maxPause))
}
