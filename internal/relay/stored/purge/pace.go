package purge

import (
	"context"
	"fmt"
	"time"

	"golang.org/x/time/rate"
)

// pace spreads the purge over time. If envelopes arrive at an even rate, removing them at that rate disturbs less
// than removing many at once after a pause. A pass starts at a little more than the rate at which envelopes
// arrived since the previous pass. For every ten seconds that the pass lasts, it doubles its rate, up to the
// limit.
type pace struct {
	limit int // envelopes per second; 0 means no limit
	batch int // maximum of one statement

	limiter       *rate.Limiter
	perSecond     float64   // rate of this pass
	removedInPass int64     // envelopes
	rateSetAt     time.Time // when perSecond was last set
	passStartedAt time.Time
}

const (
	minShare            = 1.0 / 16 // of the limit: the initial rate if the previous pass removed nothing
	catchUpFactor       = 1.25     // of the arrival rate, so that a purge that is behind catches up
	statementsPerSecond = 20       // over which a slow pass is spread
	minBatch            = 20       // envelopes in one statement

	doubleAfter = 10 * time.Second
)

// startPass starts a pass. It estimates the arrival rate by the removals of the previous pass, divided by the time
// since that pass started.
func (p *pace) startPass(now time.Time) {
	if p.limit > 0 {
		arrivals := 0.0
		if since := now.Sub(p.passStartedAt); !p.passStartedAt.IsZero() && since > 0 {
			arrivals = float64(p.removedInPass) / since.Seconds()
		}

		limit := float64(p.limit)
		p.setRate(now, min(max(catchUpFactor*arrivals, minShare*limit), limit))
	}
	p.passStartedAt, p.removedInPass = now, 0
}

func (p *pace) setRate(now time.Time, perSecond float64) {
	p.perSecond, p.rateSetAt = perSecond, now
	if p.limiter == nil {
		p.limiter = rate.NewLimiter(0, p.batch)
	}
	p.limiter.SetLimit(rate.Limit(perSecond))
}

// batchSize returns how many envelopes the next statement may remove.
func (p *pace) batchSize() int {
	if p.limit == 0 {
		return p.batch
	}
	return min(max(int(p.perSecond/statementsPerSecond), minBatch), p.batch)
}

// waitForRate counts n removed envelopes and blocks until the rate permits more.
func (p *pace) waitForRate(ctx context.Context, n int64, now time.Time) error {
	p.removedInPass += n
	if p.limit == 0 {
		return nil
	}

	if now.Sub(p.rateSetAt) >= doubleAfter && p.perSecond < float64(p.limit) {
		p.setRate(now, min(2*p.perSecond, float64(p.limit)))
	}

	// n can exceed the batch: copied envelopes may share a stamp, and one statement removes all of them.
	for n > 0 {
		part := min(n, int64(p.batch))
		n -= part
		if err := p.limiter.WaitN(ctx, int(part)); err != nil {
			return fmt.Errorf("waiting for the rate of the purge: %w", err)
		}
	}
	return nil
}
