package pipeline

import (
	"github.com/outrelay/outrelay/internal/contract/slot"
	"github.com/outrelay/outrelay/internal/relay/stored/lease"
)

// DrainedSlot is a slot of the previous division. It has delivered every event of its part up to a
// position in the stream.
type DrainedSlot struct {
	Slot slot.Range
	Pos  string
}

// ParseDrainedSlots returns the drained slots that doc contains.
func ParseDrainedSlots(doc *lease.Document) []DrainedSlot {
	var out []DrainedSlot
	for _, p := range doc.Passed {
		if part, err := slot.Parse(p.Slot); err == nil {
			out = append(out, DrainedSlot{part, p.Pos})
		}
	}
	return out
}

// deliveredByOldSlot reports whether a slot of the previous division has delivered p.ev or stored
// it as a waiting envelope (N28). The old slots are drained before the division, each up to its own
// position. The streams of the new slots begin at the lowest of these positions.
func (p *Pump) deliveredByOldSlot() bool {
	ahead := false
	for _, old := range p.drainedSlots {
		if string(p.ev.Pos) > old.Pos {
			continue
		}
		ahead = true
		if p.ev.HasDocument && old.Slot.Contains(p.ev.Document) {
			return true
		}
	}

	// The stream has passed the positions of all old slots.
	if !ahead {
		p.drainedSlots = nil
	}
	return false
}
