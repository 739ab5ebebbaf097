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

	limiter *rate.Limiter
	now     float64   // rate of this pass
	done    int64     // envelopes of this pass
	step    time.Time // when now was last set
	last    time.Time // when the pass before began
}

const (
	slowest = 1.0 / 16 // of the limit: where a purge that had nothing to do begins
	ahead   = 1.25     // of what came in, so that one that is behind catches up
	perSec  = 20       // statements a second to spread a slow pass over
	fewest  = 20       // envelopes in one statement

	patience = 10 * time.Second
)

// begin starts a pass. What the one before did, over the time since its begin, is what comes in.
func (p *pace) begin(now time.Time) {
	if p.limit > 0 {
		income := 0.0
		if since := now.Sub(p.last); !p.last.IsZero() && since > 0 {
			income = float64(p.done) / since.Seconds()
		}
		p.set(now, min(max(ahead*income, slowest*float64(p.limit)), float64(p.limit)))
	}
	p.last, p.done = now, 0
}

func (p *pace) set(now time.Time, perSecond float64) {
	p.now, p.step = perSecond, now
	if p.limiter == nil {
		p.limiter = rate.NewLimiter(0, p.batch)
	}
	p.limiter.SetLimit(rate.Limit(perSecond))
}

// next is how many envelopes the next statement may remove.
func (p *pace) next() int {
	if p.limit == 0 {
		return p.batch
	}
	return min(max(int(p.now/perSec), fewest), p.batch)
}

// removed waits until n more envelopes are paid for.
func (p *pace) removed(ctx context.Context, n int64, now time.Time) error {
	p.done += n
	if p.limit == 0 {
		return nil
	}
	if now.Sub(p.step) >= patience && p.now < float64(p.limit) {
		p.set(now, min(2*p.now, float64(p.limit)))
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
