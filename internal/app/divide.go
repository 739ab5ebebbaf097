package app

import (
	"context"
	"slices"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/lease"
	"github.com/outrelay/outrelay/internal/outboxes"
	"github.com/outrelay/outrelay/internal/pipeline"
)

// assignSlot sets the slot of the term in each outbox of list, and returns list.
func (t *term) assignSlot(list []outboxes.Outbox) []outboxes.Outbox {
	for i := range list {
		list[i].Part = t.slot.part
	}
	return list
}

// slotHadBegun reports whether the slot has had a position. A watcher with one slot and claims has
// had a position, because the position is saved before the first claim. With several slots, the
// claims may belong to other slots, so the slot is looked up. If that fails, it returns true: a
// slot must not start from the beginning by mistake.
func (t *term) slotHadBegun(ctx context.Context) bool {
	if t.slot.part.Whole() {
		return true
	}

	begun := true
	_ = t.retryCall(ctx, "mongodb", func(ctx context.Context) (err error) {
		begun, err = t.slot.relay.divisions.Begun(ctx, t.slot.cfg.Watcher, t.slot.part)
		return err
	})
	return begun
}

// agreeOnStart returns where all slots of a watcher without a checkpoint start, which is where the
// first of them starts. at is the proposal of this slot. If the slots started at different times,
// events in between would be missing or sent twice.
func (t *term) agreeOnStart(ctx context.Context, at bson.Timestamp) (bson.Timestamp, error) {
	if t.slot.part.Whole() {
		return at, nil
	}
	err := t.retryCall(ctx, "mongodb", func(ctx context.Context) (err error) {
		at, err = t.slot.relay.divisions.StartAt(ctx, t.slot.cfg.Watcher, t.slot.part, at)
		return err
	})
	return at, err
}

// markSlotBegun stores that the slot has a position.
func (t *term) markSlotBegun(ctx context.Context) error {
	if t.slot.part.Whole() {
		return nil
	}
	return t.retryCall(ctx, "mongodb", func(ctx context.Context) error {
		return t.slot.relay.divisions.Begin(ctx, t.slot.cfg.Watcher, t.slot.part)
	})
}

// forgetDrainedSlotsLocked removes the drained slots from the document once the watermark has
// passed their positions. The caller holds startMu.
func (t *term) forgetDrainedSlotsLocked(ctx context.Context) {
	if t.drainedSlots == nil || t.sweeping.Load() != nil {
		return
	}
	reached, ok := t.dispatcher.Reached()
	if !ok {
		return
	}
	notPassed := func(d pipeline.DrainedSlot) bool { return outboxes.PosOf(reached) <= d.Pos }
	if slices.ContainsFunc(t.drainedSlots, notPassed) {
		return
	}

	// If the save fails, the renewal fails with the same error and reports it.
	if t.held.Save(ctx, lease.Update{Current: true, ClearPassed: true}) == nil {
		t.drainedSlots = nil
	}
}
