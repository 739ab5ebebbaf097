package retention

import (
	"context"
	"fmt"
	"time"

	"golang.org/x/time/rate"
)

// pace spreads the purge over time. Where envelopes come at an even rate, removing at that rate disturbs less than doing
// nothing for a while and then all of it at once. So a pass begins at a little more than what the one before had to do,
// and doubles its rate with every ten seconds that it lasts, up to the limit.
type pace struct {
	limit int // envelopes a second; 0 is none
	batch int // the most in one statement

	limiter       *rate.Limiter
	perSecond     float64   // rate of this pass
	removedInPass int64     // envelopes of this pass
	rateSetAt     time.Time // when now was last set
	passStartedAt time.Time // when the pass before began
}

const (
	minShare            = 1.0 / 16 // of the limit: where a purge that had nothing to do begins
	catchUpFactor       = 1.25     // of what came in, so that one that is behind catches up
	statementsPerSecond = 20       // statements a second to spread a slow pass over
	minBatch            = 20       // envelopes in one statement

	doubleAfter = 10 * time.Second
)

// startPass starts a pass. What the one before did, over the time since its begin, is what comes in.
func (p *pace) startPass(now time.Time) {
	if p.limit > 0 {
		income := 0.0
		if since := now.Sub(p.passStartedAt); !p.passStartedAt.IsZero() && since > 0 {
			income = float64(p.removedInPass) / since.Seconds()
		}
		p.setRate(now, min(max(catchUpFactor*income, minShare*float64(p.limit)), float64(p.limit)))
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

// batchSize is how many envelopes the next statement may remove.
func (p *pace) batchSize() int {
	if p.limit == 0 {
		return p.batch
	}
	return min(max(int(p.perSecond/statementsPerSecond), minBatch), p.batch)
}

// waitForRate waits until n more envelopes are paid for.
func (p *pace) waitForRate(ctx context.Context, n int64, now time.Time) error {
	p.removedInPass += n
	if p.limit == 0 {
		return nil
	}
	if now.Sub(p.rateSetAt) >= doubleAfter && p.perSecond < float64(p.limit) {
		p.setRate(now, min(2*p.perSecond, float64(p.limit)))
	}
	for n > 0 { // copied envelopes may share a stamp, and go together however many they are
		part := min(n, int64(p.batch))
		n -= part
		if err := p.limiter.WaitN(ctx, int(part)); err != nil {
			return fmt.Errorf("pacing the purge: %w", err)
		}
	}
	return nil
}
