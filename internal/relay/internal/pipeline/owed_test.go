package pipeline

import (
	"testing"

	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/relay/stored/outboxes"
	"github.com/outrelay/outrelay/resume"
)

// N22: how far a sweep has come is known when everything that it delivered is resolved, and again unknown at the begin of another sweep.
func TestN22_TheEnvelopesOfASweepWaitUntilAllOfItsTargetsAreResolved(t *testing.T) {
	t.Parallel()
	d, sink, _ := newTestDispatcher(t, Config{})
	outlet := NewOutlet(BuildConfig{}, d)
	start := resume.Position{ClusterTime: positionAt(5).ClusterTime}
	d.Position(start)
	check := func(when, want string) {
		t.Helper()
		if got := outlet.ReachedBySweep(); got != want {
			t.Errorf("%s: %q, want %q", when, got, want)
		}
	}
	check("without a sweep", outboxes.PosOf(start))

	d.HoldSwept()
	check("before the sweep", "")
	if err := d.Deliver(t.Context(), itemOfSize("a", 1)); err != nil {
		t.Fatal(err)
	}
	d.ReleaseSwept()
	if err := d.Deliver(t.Context(), itemOfSize("a", 1)); err != nil {
		t.Fatal(err)
	}
	// The end of the next part changes nothing for this part.
	d.ReleaseSwept()
	check("while its target is in flight", "")
	d.Acked(record.TopicPartition{Topic: "a"}, 0, sink.sent[:1], 1)
	check("when its target is acked", outboxes.PosOf(start))

	d.HoldSwept()
	check("when another sweep begins", "")
}
