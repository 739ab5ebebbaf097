package pipeline

import (
	"testing"

	"github.com/outrelay/outrelay/internal/record"
)

func TestN15_AuditMendsOnlyWhatIsWrongTwice(t *testing.T) {
	t.Parallel()
	d, _, m := newTestDispatcher(t, Config{})
	a := d.NewAudit()
	closed := func(key string) bool { return d.CheckGate(&itemWithKey(key, "a").Records[0], false) != nil }
	look := func(held map[Gate]int) int {
		l := a.StartComparison()
		for g, n := range held {
			for range n {
				l.AddStored(g.NS, g.Topic, g.Key)
			}
		}
		return l.CorrectGates()
	}
	leaked, moving, low := Gate{"", "a", "leaked"}, Gate{"", "a", "moving"}, Gate{"", "a", "low"}
	d.CloseGate("", "a", "leaked")
	d.CloseGate("", "a", "moving")
	held := map[Gate]int{low: 2}
	if n := look(held); n != 0 || !closed("leaked") {
		t.Fatalf("%d gates mended at the first look", n)
	}
	d.CloseGate(moving.NS, moving.Topic, moving.Key)
	if n := look(held); n != 2 || closed(leaked.Key) || !closed(moving.Key) || !closed(low.Key) {
		t.Fatalf("%d gates mended at the second look, want the leaked and the low one", n)
	}
	// While something waits to be written nothing is certain.
	d.Withdrawn([]record.Withdrawn{{Ticket: d.tracker.Begin(0, 1), Topic: "a", Key: []byte("new"), Held: record.ErrBlocked}})
	held[moving] = 0
	delete(held, low)
	look(held)
	if n := look(held); n != 0 {
		t.Fatalf("%d gates mended while an exception waits to be written", n)
	}
	recordQueued(t, d, m)
	held[Gate{"", "a", "new"}] = 1
	if n := look(held); n != 2 || closed(moving.Key) || closed(low.Key) || !closed("new") {
		t.Fatalf("%d gates mended afterwards, want two", n)
	}
}
