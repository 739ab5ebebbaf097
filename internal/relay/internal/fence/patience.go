package fence

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/outrelay/outrelay/internal/base/retry"
	"github.com/outrelay/outrelay/internal/kafkawire"
)

// Patience limits how long a step is retried.
type Patience struct {
	// Stuck is how long CONCURRENT_TRANSACTIONS is tolerated. Defaults to 10 s (N4).
	Stuck time.Duration
	// Total bounds the step as a whole. 0 means no bound: the step waits for a coordinator that is away.
	Total time.Duration
	// Gate reports whether the lease is valid. While it is not, the step waits. nil means always valid.
	Gate func() bool
	// Waiting is called if a step has been retried for 5 s, after each further attempt, with the time of the first attempt and an error
	// that names the step. When the step ends, with whatever result, it is called with nil. nil means that no call is needed.
	Waiting func(err error, began time.Time)
}

const (
	stuckLimit  = 10 * time.Second
	reportAfter = 5 * time.Second
	gatePoll    = 10 * time.Millisecond
)

// waitForGate blocks until the gate is open. It returns the cause of ctx if ctx ends.
func (p Patience) waitForGate(ctx context.Context) error {
	for ctx.Err() == nil && p.Gate != nil && !p.Gate() {
		_ = retry.Sleep(ctx, gatePoll)
	}
	return context.Cause(ctx)
}

// retry repeats try until it succeeds, fails permanently, or the patience or ctx ends.
func (p Patience) retry(ctx context.Context, step string, try func() error) error {
	var stuckSince time.Time
	began, waiting := time.Now(), false
	defer func() {
		if waiting {
			p.Waiting(nil, began)
		}
	}()

	for n := 1; ; n++ {
		if err := p.waitForGate(ctx); err != nil {
			return err
		}
		err := try()
		now := time.Now()

		// A coordinator that is still writing markers (H4) mostly ends within milliseconds, so the
		// first waits are short.
		wait := min(time.Duration(n)*3*time.Millisecond, 100*time.Millisecond)
		switch {
		case err == nil:
			return nil
		case ctx.Err() != nil:
			return context.Cause(ctx)
		case errors.Is(err, kafkawire.ProducerFenced), errors.Is(err, kafkawire.InvalidProducerEpoch):
			return fmt.Errorf("%s: %w (%w)", step, ErrFenced, err)
		case errors.Is(err, kafkawire.ConcurrentTransactions):
			if stuckSince.IsZero() {
				stuckSince = now
			}
			if now.Sub(stuckSince) >= cmp.Or(p.Stuck, stuckLimit) {
				return fmt.Errorf("%s: %w", step, errStuck)
			}
		case !kafkawire.IsRetriable(err):
			return fmt.Errorf("%s: %w", step, err)
		default:
			wait = min(time.Duration(n)*20*time.Millisecond, time.Second)
		}

		if p.Total > 0 && now.Sub(began) >= p.Total {
			if !stuckSince.IsZero() {
				return fmt.Errorf("%s: %w", step, errStuck)
			}
			return fmt.Errorf("%s: %w: %w", step, errDeadline, err)
		}
		if now.Sub(began) >= reportAfter && p.Waiting != nil {
			waiting = true
			p.Waiting(fmt.Errorf("%s: %w", step, err), began)
		}
		_ = retry.Sleep(ctx, wait)
	}
}
