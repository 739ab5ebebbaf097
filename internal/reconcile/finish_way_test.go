package reconcile

import (
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

type fakeTable struct{ due atomic.Bool }

func (f *fakeTable) behind() bool    { return f.due.Load() }
func (f *fakeTable) landed([]uint64) {}
func (f *fakeTable) token() string   { return "token" }

// TestTidyingGivesWayToWhatIsDue: what was sent is removed after what is due is claimed, but not for ever; and all else goes
// before it.
func TestTidyingGivesWayToWhatIsDue(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		table := &fakeTable{}
		table.due.Store(true)
		f := NewFinisher(Finishing{})
		f.table = table
		f.spent.add(spent{ns: "db.outbox"})
		waits := func() time.Duration {
			began := time.Now()
			for _, wait := f.tidying(); wait; _, wait = f.tidying() {
				<-time.After(time.Millisecond)
			}
			return time.Since(began)
		}
		for range 2 { // a second batch waits as well
			if d := waits(); d < patience || d > patience+2*time.Millisecond {
				t.Errorf("a sent one waited %v behind what cannot be claimed, want %v", d, patience)
			}
		}
		go func() {
			<-time.After(patience / 5)
			table.due.Store(false)
		}()
		if d := waits(); d < patience/5 || d > patience/4 {
			t.Errorf("it waited %v, want until nothing is due any more", d)
		}
		table.due.Store(true)
		f.queue = []*answered{{Delivery: &Delivery{}}}
		if next, wait := f.tidying(); next || wait {
			t.Error("an exception, whose key waits for it, does not go first")
		}
		if batch := f.take(true); len(batch) != 1 || batch[0].Claim != "" {
			t.Errorf("%+v goes before an exception", batch)
		}
		if batch := f.take(true); len(batch) != 1 || batch[0].Claim != "token" || !batch[0].outcome.Delete || f.spent != nil {
			t.Errorf("%+v, want the removal of the sent one", batch)
		}
	})
}
