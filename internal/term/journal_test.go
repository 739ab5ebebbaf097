package term

import (
	"testing"

	"github.com/outrelay/outrelay/internal/fence"
)

// A new cluster causes an event for each of its partitions. These events share entries of the log, which are written
// one after the other.
func TestEventsOfTheFenceShareTheirEntries(t *testing.T) {
	t.Parallel()
	const partitions = 60_000
	var f fenceEvents
	writers, entries, counted := 0, 0, 0
	add := func(n int) {
		for range n {
			if f.addEvent(fence.Event{Kind: fence.OutOfRange, Topic: "t"}) {
				writers++
			}
		}
	}

	add(1)
	f.writeEach(func(e fence.Event, n int) {
		if entries == 0 {
			add(partitions - 1) // while the first one is written
			if f.addEvent(fence.Event{Kind: fence.Truncated, Topic: "u"}) {
				t.Error("a second writer")
			}
		}
		entries++
		counted += n
	})

	if writers != 1 || entries != 3 || counted != partitions+1 {
		t.Errorf("%d writers, %d entries of %d events", writers, entries, counted)
	}
	if !f.addEvent(fence.Event{Kind: fence.Truncated}) {
		t.Error("later events are not written")
	}
}
