package dispatch

import (
	"fmt"
	"testing"

	"github.com/outrelay/outrelay/internal/record"
)

// One that is opened more often than it was closed, because the audit had set it right meanwhile, opens no other.
func TestN15_AnUncountedOpeningLeavesTheOthersClosed(t *testing.T) {
	t.Parallel()
	d, _, _ := start(t, Config{})
	closed := func(key string) bool { return d.Closed(&keyed(key, "a").Records[0], false) != nil }
	d.Gate("", "a", "waits")
	d.Open("", "a", "another")
	if !closed("waits") {
		t.Fatal("a gate opened with that of another key")
	}
	d.Open("", "a", "waits")
	if closed("waits") || d.Gated() != 0 {
		t.Fatalf("%d gates are left", d.Gated())
	}
}

// What is on its way opens its gate when it is told of. An audit that took it off before would let that opening be another's.
func TestN15_AnAuditLeavesWhatIsOnItsWay(t *testing.T) {
	t.Parallel()
	d, _, _ := start(t, Config{})
	closed := func() bool { return d.Closed(&keyed("k", "a").Records[0], false) != nil }
	busy := true
	a := d.NewAudit()
	look := func() int {
		g, ok := a.Gates()
		if !ok {
			t.Fatal("the gates are too many")
		}
		return a.Compare(g, nil, func(id Gate) bool { return busy && id.Key == "k" })
	}
	d.Gate("", "a", "k") // its document is finished, and it was not told yet
	for range 3 {
		if n := look(); n != 0 {
			t.Fatalf("%d gates mended", n)
		}
	}
	d.Gate("", "a", "k") // a later one of the key
	d.Open("", "a", "k") // told
	if !closed() {
		t.Fatal("the later one's gate is open")
	}
	busy = false
	look()
	if n := look(); n != 1 || closed() {
		t.Fatalf("%d gates mended, want the one that nothing waits behind", n)
	}
}

// Gates that were too many to count by key are counted by key again when few are left, also where some were never opened; and
// what was decided meanwhile, or is on its way, stays behind its own.
func TestN15_GatesAreCountedAnewWhenFewAreLeft(t *testing.T) {
	t.Parallel()
	d, _, m := start(t, Config{MaxGates: 10})
	closed := func(key string) bool { return d.Closed(&keyed(key, "a").Records[0], false) != nil }
	withdraw := func(key string) {
		d.Withdrawn([]record.Withdrawn{{Ticket: d.tracker.Begin(0, 1), Topic: "a", Key: []byte(key), Held: record.ErrBlocked}})
	}
	for i := range 12 {
		d.Gate("", "a", fmt.Sprint(i)) // their collection is dropped
	}
	withdraw("before")
	a := d.NewAudit()
	if _, narrow := a.Gates(); narrow || !closed("free") {
		t.Fatal("the gates are not wide")
	}
	decided, wide := a.Recount()
	if !wide || a.Written(decided) {
		t.Fatalf("wide %v, and what was decided counts as written", wide)
	}
	record1(t, d, m)
	if !a.Written(decided) {
		t.Fatal("what was decided is written, and does not count as that")
	}
	held := map[Gate]int{{"", "a", "before"}: 1}
	withdraw("since")
	if !a.Narrow(held, map[Gate]int{{"", "a", "flying"}: 1}) {
		t.Fatal("the gates stay wide")
	}
	for key, want := range map[string]bool{"before": true, "since": true, "flying": true, "free": false, "3": false} {
		if closed(key) != want {
			t.Errorf("the gate of %s: closed %v, want %v", key, closed(key), want)
		}
	}
	if n := d.Gated(); n != 3 {
		t.Errorf("%d gates, want 3", n)
	}
	if a.Narrow(nil, nil) || !closed("since") {
		t.Error("gates that are counted by key were counted anew")
	}
}

// Too many stay too many.
func TestN15_GatesStayWideWhileManyWait(t *testing.T) {
	t.Parallel()
	d, _, _ := start(t, Config{MaxGates: 10})
	held := map[Gate]int{}
	for i := range 12 {
		d.Gate("", "a", fmt.Sprint(i))
		held[Gate{"", "a", fmt.Sprint(i)}] = 1
	}
	a := d.NewAudit()
	if _, wide := a.Recount(); !wide {
		t.Fatal("the gates are not wide")
	}
	if a.Narrow(held, nil) || d.Closed(&keyed("free", "a").Records[0], false) == nil || d.Gated() != 12 {
		t.Fatalf("%d gates are left", d.Gated())
	}
}
