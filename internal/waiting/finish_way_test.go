package waiting

import (
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

type fakeTable struct{ due atomic.Bool }

func (f *fakeTable) HasClaimable() bool  { return f.due.Load() }
func (f *fakeTable) EndFlights([]uint64) {}
func (f *fakeTable) ClaimToken() string  { return "token" }

// TestTidyingGivesWayToWhatIsDue: sent envelopes are removed after due ones are claimed, within a limited time. All
// other work has precedence.
func TestTidyingGivesWayToWhatIsDue(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		table := &fakeTable{}

		table.due.Store(true)
		f := NewFinisher(FinisherConfig{})
		f.Scheduled = table
		f.removals.appendRemoval(removal{ns: "db.outbox"})

		waits := func() time.Duration {
			began := time.Now()
			for _, wait := f.checkRemovals(); wait; _, wait = f.checkRemovals() {
				<-time.After(time.Millisecond)
			}
			return time.Since(began)
		}

		for range 2 { // a second batch waits as well
			if d := waits(); d < maxRemovalWait || d > maxRemovalWait+2*time.Millisecond {
				t.Errorf("a sent one waited %v behind what cannot be claimed, want %v", d, maxRemovalWait)
			}
		}

		go func() {
			<-time.After(maxRemovalWait / 5)
			table.due.Store(false)
		}()

		if d := waits(); d < maxRemovalWait/5 || d > maxRemovalWait/4 {
			t.Errorf("it waited %v, want until nothing is due any more", d)
		}

		table.due.Store(true)
		f.queue = []*decision{{Delivery: &Delivery{}}}
		if next, wait := f.checkRemovals(); next || wait {
			t.Error("an exception, whose key waits for it, does not go first")
		}
		if batch := f.nextBatch(true); len(batch) != 1 || batch[0].Claim != "" {
			t.Errorf("%+v goes before an exception", batch)
		}

		if batch := f.nextBatch(true); len(batch) != 1 || batch[0].Claim != "token" || !batch[0].outcome.Delete || f.removals != nil {
			t.Errorf("%+v, want the removal of the sent one", batch)
		}
	})
}
