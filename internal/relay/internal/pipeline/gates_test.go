package pipeline

import (
	"fmt"
	"testing"
)

// One topic has more waiting keys than there may be counters: keys of other topics flow, and after a waiting envelope of theirs that key
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
	d.CloseGate("", "b", "rejected")
	for i := range waiting {
		d.CloseGate("", "a", fmt.Sprint(i))
	}
	if n := free("b"); n != 1000 || !closed("b", "rejected") {
		t.Errorf("%d of 1000 free keys of another topic are open, want all. The rejected key is closed: %v, want true", n, closed("b", "rejected"))
	}
	for i := range waiting {
		if !closed("a", fmt.Sprint(i)) {
			t.Fatalf("key %d flows although it waits", i)
		}
	}
	if d.gates.counters > most || d.gates.waiting != waiting+1 {
		t.Errorf("%d counters of %d for %d waiting envelopes", d.gates.counters, most, d.gates.waiting)
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
	d.OpenGate("", "b", "rejected")
	if n := d.gates.active.Load(); n != 0 || d.gates.counters != 0 || len(d.gates.topics) != 0 {
		t.Errorf("%d gates and %d counters are left", n, d.gates.counters)
	}
}
