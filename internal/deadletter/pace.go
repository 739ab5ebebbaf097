package deadletter

import (
	"context"
	"time"

	"github.com/outrelay/outrelay/internal/retry"
)

// Bounds of the pace.
const (
	initialPartSize  = 250
	minPartSize   = 25
	fastPart      = 100 * time.Millisecond // a part that took less may grow
	slowPart       = 300 * time.Millisecond // one that took more had better shrink
	maxPause = 200 * time.Millisecond
)

// pace fits the number of letters in a transaction to what the server does: a transaction with the fence keeps the owner
// from renewing, and one of the owner that takes longer than its lease never commits. So parts are as large as a fraction of a
// second allows.
type pace struct{ partSize int }

func newPace() *pace { return &pace{partSize: initialPartSize} }

// recordDuration says how long a part of letters took.
func (p *pace) recordDuration(d time.Duration, letters int) {
	switch {
	case d > slowPart:
		p.partSize = max(min(p.partSize, letters)/2, min(p.partSize, minPartSize))
	case d < fastPart && letters >= p.partSize:
		p.partSize = min(p.partSize*2, MaxLetters)
	}
}

// recordTimeout says that a part of letters was attempted in vain.
func (p *pace) recordTimeout(letters int) { p.partSize = max(letters/4, 1) }

// yieldToOwner lets the owner come to its renewal before the next part takes the fence again.
func yieldToOwner(ctx context.Context, took time.Duration) error {
	return retry.Sleep(ctx, min(10*time.Millisecond+took/4, maxPause))
}
