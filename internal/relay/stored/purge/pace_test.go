package purge

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"
)

// runPass runs a pass with n envelopes to remove, and returns its duration.
func runPass(t *testing.T, p *pace, n int64) time.Duration {
	t.Helper()
	begun := time.Now()
	p.startPass(begun)
	for left := n; left > 0; {
		step := min(int64(p.batchSize()), left)
		left -= step
		if err := p.waitForRate(t.Context(), step, time.Now()); err != nil {
			t.Fatal(err)
		}
	}
	return time.Since(begun)
}

func TestPaceKeepsUpAndNoMore(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		p := &pace{limit: 5000, batch: 500}

		// A backlog: it begins slowly and doubles up to the limit, which it never passes.
		if took := runPass(t, p, 500_000); took < 100*time.Second || took > 150*time.Second {
			t.Errorf("a backlog of 100 s took %v", took)
		}
		if p.batchSize() != 250 {
			t.Errorf("%d in one statement at the limit", p.batchSize())
		}

		// Envelopes that arrive evenly, 1,000/s, are spread over most of the interval, in small
		// statements.
		for range 20 {
			begun := time.Now()
			runPass(t, p, 10_000)
			<-time.After(10*time.Second - time.Since(begun))
		}
		begun := time.Now()
		took := runPass(t, p, 10_000)
		if took < 6*time.Second || took > 9*time.Second || p.batchSize() > 70 {
			t.Errorf("10,000 took %v by %d", took, p.batchSize())
		}
		<-time.After(10*time.Second - time.Since(begun))

		// Ten times as much: it lags, then catches up.
		var last time.Duration
		for range 8 {
			begun := time.Now()
			last = runPass(t, p, 40_000)
			<-time.After(max(10*time.Second-time.Since(begun), 0))
		}
		if last > 10*time.Second {
			t.Errorf("40,000 in 10 s still take %v", last)
		}
	})
}

func TestPaceWithoutALimitAndWithAnEnd(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		p := &pace{batch: 500}
		if took := runPass(t, p, 1_000_000); took != 0 || p.batchSize() != 500 {
			t.Errorf("waited %v", took)
		}

		p = &pace{limit: 16, batch: 10}
		p.startPass(time.Now())
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if err := p.waitForRate(ctx, 10_000, time.Now()); err == nil || errors.Is(err, context.Canceled) {
			t.Errorf("10,000 that share a stamp were paid for at once: %v", err)
		}
	})
}
