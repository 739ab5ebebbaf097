package reconcile

import (
	"testing"
	"testing/synctest"
	"time"
)

// TestTidyingGivesWayToWhatIsDue: what was sent is finished after what is due is claimed, but not for ever.
func TestTidyingGivesWayToWhatIsDue(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		behind := true
		f := NewFinisher(Finishing{Behind: func() bool { return behind }})
		waits := func(claim string, end End) time.Duration {
			f.queue = []*answered{{Delivery: &Delivery{Claim: claim}, fate: Fate{End: end}}}
			began := time.Now()
			f.giveWay(t.Context())
			return time.Since(began)
		}
		if d := waits("token", Finished); d < patience || d > 2*patience {
			t.Errorf("a sent one waited %v behind what cannot be claimed, want %v", d, patience)
		}
		if d := waits("", Finished); d != 0 {
			t.Errorf("an exception, whose key waits for it, waited %v", d)
		}
		if d := waits("token", Retrying); d != 0 {
			t.Errorf("a failed one waited %v", d)
		}
		go func() {
			<-time.After(patience / 5)
			behind = false
		}()
		if d := waits("token", Finished); d < patience/5 || d > patience/4 {
			t.Errorf("it waited %v, want until nothing is due any more", d)
		}
	})
}
