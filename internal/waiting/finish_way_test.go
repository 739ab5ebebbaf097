package waiting

import (
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

// TestTidyingGivesWayToDueEnvelopes: sent envelopes are removed after due ones are claimed, within a limited time. All
// other work has precedence.
func TestTidyingGivesWayToDueEnvelopes(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var due atomic.Bool
		due.Store(true)
		f := NewFinisher(FinisherConfig{})
		f.HasClaimable = due.Load
		f.queueDecision(&decision{Delivery: &Delivery{NS: "db.outbox", Claim: "token"}, removed: true})

		waits := func() time.Duration {
			began := time.Now()
			for f.removalsYield(time.Now()) {
				<-time.After(time.Millisecond)
			}
			return time.Since(began)
		}

		// A second batch waits as well.
		for range 2 {
			if d := waits(); d < maxRemovalWait || d > maxRemovalWait+2*time.Millisecond {
				t.Errorf("a removal waited %v for envelopes that cannot be claimed, want %v", d, maxRemovalWait)
			}
		}

		go func() {
			<-time.After(maxRemovalWait / 5)
			due.Store(false)
		}()

		if d := waits(); d < maxRemovalWait/5 || d > maxRemovalWait/4 {
			t.Errorf("it waited %v, want until nothing is due any more", d)
		}

		due.Store(true)
		f.queueDecision(&decision{Delivery: &Delivery{}})
		if f.removalsYield(time.Now()) {
			t.Error("an exception, whose key waits for it, does not go first")
		}
		if batch := f.nextBatch(true); len(batch) != 1 || batch[0].Claim != "" {
			t.Errorf("%+v goes before an exception", batch)
		}
		if batch := f.nextBatch(true); len(batch) != 1 || batch[0].Claim != "token" || f.removals != nil {
			t.Errorf("%+v, want the removal of the sent one", batch)
		}
	})
}
