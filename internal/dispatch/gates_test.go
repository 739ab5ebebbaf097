package dispatch

import "testing"

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
