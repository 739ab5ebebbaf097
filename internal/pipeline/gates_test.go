package pipeline

import (
	"fmt"
	"testing"
)

// One that is opened more often than it was closed, because the audit had set it right meanwhile, opens no other.
func TestN15_AnUncountedOpeningLeavesTheOthersClosed(t *testing.T) {
	t.Parallel()
	d, _, _ := newTestDispatcher(t, Config{})
	closed := func(key string) bool { return d.CheckGate(&itemWithKey(key, "a").Records[0], false) != nil }
	d.CloseGate("", "a", "waits")
	d.OpenGate("", "a", "another")
	if !closed("waits") {
		t.Fatal("a gate opened with that of another key")
	}
	d.OpenGate("", "a", "waits")
	if closed("waits") || d.CountGated() != 0 {
		t.Fatalf("%d gates are left", d.CountGated())
	}
}

// What is on its way opens its gate when it is told of. An audit that took it off before would let that opening be another's.
func TestN15_AnAuditLeavesWhatIsOnItsWay(t *testing.T) {
	t.Parallel()
	d, _, _ := newTestDispatcher(t, Config{})
	closed := func() bool { return d.CheckGate(&itemWithKey("k", "a").Records[0], false) != nil }
	busy := true
	a := d.NewAudit()
	look := func() int {
		l := a.StartComparison()
		if busy {
			l.MarkInFlight("", "k")
		}
		return l.CorrectGates()
	}
	d.CloseGate("", "a", "k") // its document is finished, and it was not told yet
	for range 3 {
		if n := look(); n != 0 {
			t.Fatalf("%d gates mended", n)
		}
	}
	d.CloseGate("", "a", "k") // a later one of the key
	d.OpenGate("", "a", "k")  // told
	if !closed() {
		t.Fatal("the later one's gate is open")
	}
	busy = false
	look()
	if n := look(); n != 1 || closed() {
		t.Fatalf("%d gates mended, want the one that nothing waits behind", n)
	}
}

// One topic has more waiting keys than there may be counters: keys of other topics flow, and behind an exception of theirs that key
// alone waits. The topic's own keys open as fewer of them wait.
func TestN15_ManyWaitingKeysOfATopicLeaveOtherTopicsAlone(t *testing.T) {
	t.Parallel()
	const waiting, most = 110_000, 20_000
	d, _, _ := newTestDispatcher(t, Config{})
	d.gates.maxCounters = most
	closed := func(topic, key string) bool { return d.CheckGate(&itemWithKey(key, topic).Records[0], false) != nil }
	free := func(topic string) (n int) {
		for i := range 1000 {
			if !closed(topic, fmt.Sprint("free", i)) {
				n++
			}
		}
		return n
	}
	d.CloseGate("", "b", "refused")
	for i := range waiting {
		d.CloseGate("", "a", fmt.Sprint(i))
	}
	if n := free("b"); n != 1000 || !closed("b", "refused") {
		t.Errorf("%d of 1000 free keys of another topic flow, the one that waits is closed: %v", n, closed("b", "refused"))
	}
	for i := range waiting {
		if !closed("a", fmt.Sprint(i)) {
			t.Fatalf("key %d flows although it waits", i)
		}
	}
	if d.gates.counters > most || d.CountGated() != waiting+1 {
		t.Errorf("%d counters of %d for %d exceptions", d.gates.counters, most, d.CountGated())
	}

	for i := range waiting - 100 {
		d.OpenGate("", "a", fmt.Sprint(i))
	}
	if n := free("a"); n < 900 {
		t.Errorf("%d of 1000 free keys flow while 100 wait", n)
	}
	for i := waiting - 100; i < waiting; i++ {
		if !closed("a", fmt.Sprint(i)) {
			t.Fatalf("key %d flows although it waits", i)
		}
		d.OpenGate("", "a", fmt.Sprint(i))
	}
	d.OpenGate("", "b", "refused")
	if n := d.gates.active.Load(); n != 0 || d.gates.counters != 0 || len(d.gates.topics) != 0 {
		t.Errorf("%d gates and %d counters are left", n, d.gates.counters)
	}
}

// Counters that several keys share are compared as well, and not while one of these keys is on its way.
func TestN15_AnAuditComparesSharedCounters(t *testing.T) {
	t.Parallel()
	d, _, _ := newTestDispatcher(t, Config{})
	d.gates.maxCounters = 8
	for i := range 100 {
		d.CloseGate("", "a", fmt.Sprint(i))
	}
	a, left := d.NewAudit(), 100
	look := func(busy ...string) int {
		l := a.StartComparison()
		for i := range left {
			l.AddStored("", "a", fmt.Sprint(i))
		}
		for _, key := range busy {
			l.MarkInFlight("", key)
		}
		return l.CorrectGates()
	}
	if n := look() + look(); n != 0 || d.gates.counters > 8 {
		t.Fatalf("%d gates mended of %d that are right", n, d.gates.counters)
	}
	left = 99 // the document of the last one is gone
	if n := look("99") + look("99"); n != 0 {
		t.Fatalf("%d gates mended while the key is on its way", n)
	}
	if n := look() + look(); n != 1 || d.CountGated() != 99 {
		t.Fatalf("%d gates mended, %d exceptions are left", n, d.CountGated())
	}
}
