package deadletter

import (
	"context"
	"time"

	"github.com/outrelay/outrelay/internal/retry"
)

// Bounds of the pace.
const (
	firstPart  = 250
	smallest   = 25
	quick      = 100 * time.Millisecond // a part that took less may grow
	slow       = 300 * time.Millisecond // one that took more had better shrink
	longestGap = 200 * time.Millisecond
)

// pace fits the number of letters in a transaction to what the server does: a transaction with the fence keeps the owner
// from renewing, and one of the owner that takes longer than its lease never commits. So parts are as large as a fraction of a
// second allows.
type pace struct{ n int }

func newPace() *pace { return &pace{n: firstPart} }

// took says how long a part of letters took.
func (p *pace) took(d time.Duration, letters int) {
	switch {
	case d > slow:
		p.n = min(p.n, max(min(p.n, letters)/2, smallest)) // it may be smaller where even those did not end in time
	case d < quick && letters >= p.n:
		p.n = min(p.n*2, MaxLetters)
	}
}

// yield lets the owner come to its renewal before the next part takes the fence again.
func yield(ctx context.Context, took time.Duration) error {
	return retry.Sleep(ctx, min(10*time.Millisecond+took/4, longestGap))
}
