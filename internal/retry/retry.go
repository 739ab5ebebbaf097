// Package retry is the one policy by which outrelay waits between attempts: exponential with full jitter. The n-th wait
// is uniform between 0 and min(cap, base·2ⁿ), so processes that lost the same server do not come back at the same moment.
//
// It never gives up on its own: whoever bounds attempts or time does so with a context or by returning [Permanent].
package retry

import (
	"context"
	"math"
	"math/rand/v2"
	"time"

	"github.com/cenkalti/backoff/v4"
)

// Policy is a base and a cap. Both must be positive; a cap below the base is the base.
type Policy struct {
	Base time.Duration // upper bound of the first wait
	Cap  time.Duration // upper bound of every wait
}

// Reopen is the policy of connections and streams: quick at first, at most every five seconds.
var Reopen = Policy{Base: 50 * time.Millisecond, Cap: 5 * time.Second}

// Delay is a wait before attempt n, counted from 0, without any state: for waits that are written down and outlive the
// process. Uniform between 0 and min(Cap, Base·2ⁿ).
func (p Policy) Delay(n int) time.Duration {
	bound := float64(p.Base) * math.Pow(2, float64(max(n, 0)))
	bound = min(bound, float64(max(p.Cap, p.Base)))
	return time.Duration(rand.Float64() * bound)
}

// Start begins a series of attempts.
func (p Policy) Start() *Backoff { return &Backoff{exponential: p.newExponential()} }

func (p Policy) newExponential() *backoff.ExponentialBackOff {
	// The library draws from interval ± interval·factor. Half of our bound with factor 1 is [0, bound]: full jitter.
	return backoff.NewExponentialBackOff(
		backoff.WithInitialInterval(max(p.Base/2, 1)),
		backoff.WithMaxInterval(max(p.Cap, p.Base, 2)/2),
		backoff.WithMultiplier(2),
		backoff.WithRandomizationFactor(1),
		backoff.WithMaxElapsedTime(0),
	)
}

// Backoff is the state of one series of attempts. It is for one goroutine.
type Backoff struct {
	exponential *backoff.ExponentialBackOff
	attempts    int
}

// Next is how long to wait now; each call doubles the bound of the following one until the cap.
func (b *Backoff) Next() time.Duration {
	b.attempts++
	return b.exponential.NextBackOff()
}

// Attempts is how many waits were asked for since the start or the last Reset.
func (b *Backoff) Attempts() int { return b.attempts }

// Reset begins again at the base: call it after a success.
func (b *Backoff) Reset() {
	b.attempts = 0
	b.exponential.Reset()
}

// Wait sleeps for Next. It returns the context's cause as soon as ctx ends.
func (b *Backoff) Wait(ctx context.Context) error { return Sleep(ctx, b.Next()) }

// Sleep waits for d or until ctx ends, whose cause it then returns.
func Sleep(ctx context.Context, d time.Duration) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// Do calls f until it returns nil or an error marked by [Permanent], which is unwrapped, or until ctx ends. Then it
// returns the error of the last attempt, or the context's cause if there was none. notify, if not nil, hears of each
// error that will be retried, with the wait that follows it.
func Do(ctx context.Context, p Policy, f func(context.Context) error, notify func(error, time.Duration)) error {
	var last error
	err := backoff.RetryNotify(func() error {
		if ctx.Err() != nil {
			if last == nil {
				last = context.Cause(ctx)
			}
			return backoff.Permanent(last)
		}
		last = f(ctx)
		return last
	}, backoff.WithContext(p.newExponential(), ctx), notify)
	if err != nil && ctx.Err() != nil && last != nil {
		return last
	}
	return err
}

// Permanent marks err so that [Do] stops at once and returns it. A nil err stays nil.
func Permanent(err error) error { return backoff.Permanent(err) }
