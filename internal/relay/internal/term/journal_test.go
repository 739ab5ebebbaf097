package term

import (
	"testing"

	"github.com/outrelay/outrelay/internal/relay/internal/fence"
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
			// These events arrive while the first one is written.
			add(partitions - 1)
			if f.addEvent(fence.Event{Kind: fence.Truncated, Topic: "u"}) {
				t.Error("addEvent requests a second writer, want one at a time")
			}
		}
		entries++
		counted += n
	})

	if writers != 1 || entries != 3 || counted != partitions+1 {
		t.Errorf("%d writers, %d entries of %d events, want 1, 3 and %d", writers, entries, counted, partitions+1)
	}
	if !f.addEvent(fence.Event{Kind: fence.Truncated}) {
		t.Error("later events are not written")
	}
}
