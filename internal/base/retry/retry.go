// Package retry implements the waits between attempts: exponential backoff with full jitter. The n-th wait
// is uniform between 0 and min(cap, base·2ⁿ), so processes that lost the same server do not reconnect at
// the same moment.
//
// There is no limit of attempts or time. To set one, use a context or return a [Permanent] error.
package retry

import (
	"context"
	"math"
	"math/rand/v2"
	"time"

	"github.com/cenkalti/backoff/v4"
)

// Policy bounds the waits. Base and Cap must be positive. A Cap below Base counts as Base.
type Policy struct {
	Base time.Duration // upper bound of the first wait
	Cap  time.Duration // upper bound of every wait
}

// Reopen is the policy for connections and streams: short waits at first, later at most five seconds.
var Reopen = Policy{Base: 50 * time.Millisecond, Cap: 5 * time.Second}

// Delay returns the wait before attempt n, counted from 0: uniform between 0 and min(Cap, Base·2ⁿ). It needs
// no state, so it suits waits that are stored and outlive the process.
func (p Policy) Delay(n int) time.Duration {
	bound := float64(p.Base) * math.Pow(2, float64(max(n, 0)))
	bound = min(bound, float64(max(p.Cap, p.Base)))
	return time.Duration(rand.Float64() * bound)
}

// Start starts a series of attempts.
func (p Policy) Start() *Backoff { return &Backoff{exponential: p.newExponential()} }

func (p Policy) newExponential() *backoff.ExponentialBackOff {
	// The library draws from interval ± interval·factor. With factor 1 and half of the bound as interval,
	// that is [0, bound]: full jitter.
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

// Next returns the next wait. Each call doubles the bound of the next one, up to the cap.
func (b *Backoff) Next() time.Duration {
	b.attempts++
	return b.exponential.NextBackOff()
}

// Attempts returns the number of calls of Next and Wait since Start or the last Reset.
func (b *Backoff) Attempts() int { return b.attempts }

// Reset sets the bound back to the base. Call it after a success.
func (b *Backoff) Reset() {
	b.attempts = 0
	b.exponential.Reset()
}

// Wait blocks for the duration of Next, or until ctx ends. Then it returns the cause of ctx.
func (b *Backoff) Wait(ctx context.Context) error { return Sleep(ctx, b.Next()) }

// Sleep blocks for duration or until ctx ends. Then it returns the cause of ctx.
func Sleep(ctx context.Context, duration time.Duration) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}

	timer := time.NewTimer(duration)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// Do calls attempt until attempt returns nil or a [Permanent] error, or until ctx ends. It returns the unwrapped
// permanent error. If ctx ends, it returns the error of the last attempt, or the cause of ctx if there was
// no attempt. If notify is not nil, Do calls it with each error that will be retried and the next wait.
func Do(ctx context.Context, policy Policy, attempt func(context.Context) error, notify func(error, time.Duration)) error {
	var last error
	err := backoff.RetryNotify(func() error {
		if ctx.Err() != nil {
			if last == nil {
				last = context.Cause(ctx)
			}
			return backoff.Permanent(last)
		}

		last = attempt(ctx)
		return last
	}, backoff.WithContext(policy.newExponential(), ctx), notify)

	if err != nil && ctx.Err() != nil && last != nil {
		return last
	}
	return err
}

// Permanent marks err so that [Do] stops at once and returns err. If err is nil, it returns nil.
func Permanent(err error) error { return backoff.Permanent(err) }
