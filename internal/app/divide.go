package app

import (
	"context"
	"slices"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/lease"
	"github.com/outrelay/outrelay/internal/slot"
	"github.com/outrelay/outrelay/internal/store"
)

// assignSlot marks collections as read by this slot only.
func (t *term) assignSlot(list []store.Outbox) []store.Outbox {
	for i := range list {
		list[i].Part = t.part
	}
	return list
}

// slotHadBegun reports whether the slot has had a position. Of one slot its claims tell: the position comes before the first of them. Of
// several, the others may have made those.
func (t *term) slotHadBegun(ctx context.Context) bool {
	if t.part.Whole() {
		return true
	}
	begun := true // what cannot be known must not begin anew
	_ = t.retryCall(ctx, "mongodb", func(ctx context.Context) (err error) {
		begun, err = t.divisions.Begun(ctx, t.cfg.Watcher, t.part)
		return err
	})
	return begun
}

// agreeOnStart is where all slots of a watcher start that has no checkpoint: where the first of them does. A slot that starts
// later would else leave out, or bring again, what the others bring.
func (t *term) agreeOnStart(ctx context.Context, at bson.Timestamp) (bson.Timestamp, error) {
	if t.part.Whole() {
		return at, nil
	}
	err := t.retryCall(ctx, "mongodb", func(ctx context.Context) (err error) {
		at, err = t.divisions.StartAt(ctx, t.cfg.Watcher, t.part, at)
		return err
	})
	return at, err
}

// markSlotBegun notes that the slot has a position.
func (t *term) markSlotBegun(ctx context.Context) error {
	if t.part.Whole() {
		return nil
	}
	return t.retryCall(ctx, "mongodb", func(ctx context.Context) error {
		return t.divisions.Begin(ctx, t.cfg.Watcher, t.part)
	})
}

// drainedSlot is what a slot that is no more had delivered of its part: everything up to a place in the stream.
type drainedSlot struct {
	part slot.Part
	pos  string
}

func parseDrainedSlots(doc *lease.Document) []drainedSlot {
	var out []drainedSlot
	for _, p := range doc.Passed {
		if part, err := slot.Parse(p.Part); err == nil {
			out = append(out, drainedSlot{part, p.Pos})
		}
	}
	return out
}

// deliveredByOldSlot reports whether an earlier slot has delivered the present event, or written down what became of it (N28). The slots
// that a watcher had are drained before it is divided anew, each up to a place of its own; the stream of the new ones begins
// at the lowest of those.
func (p *pump) deliveredByOldSlot() bool {
	ahead := false
	for _, old := range p.drainedSlots {
		if string(p.ev.Data) > old.pos {
			continue
		}
		ahead = true
		if p.ev.HasDocument && old.part.Has(p.ev.Document) {
			return true
		}
	}
	if !ahead {
		p.drainedSlots = nil
	}
	return false
}

// forgetDrainedSlotsLocked removes the places from the document when the watermark has passed them.
func (t *term) forgetDrainedSlotsLocked(ctx context.Context) {
	if t.drainedSlots == nil || t.sweeping.Load() != nil {
		return
	}
	reached, ok := t.dispatcher.Reached()
	if !ok || slices.ContainsFunc(t.drainedSlots, func(p drainedSlot) bool { return positionKey(reached) <= p.pos }) {
		return
	}
	if t.held.Save(ctx, lease.Update{Current: true, ClearPassed: true}) == nil { // else said by the renewal
		t.drainedSlots = nil
	}
}
