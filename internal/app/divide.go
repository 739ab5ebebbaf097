package app

import (
	"context"
	"slices"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/lease"
	"github.com/outrelay/outrelay/internal/slot"
	"github.com/outrelay/outrelay/internal/store"
)

// mine marks collections as read by this slot only.
func (t *term) mine(list []store.Outbox) []store.Outbox {
	for i := range list {
		list[i].Part = t.part
	}
	return list
}

// hadBegun reports whether the slot has had a position. Of one slot its claims tell: the position comes before the first of them. Of
// several, the others may have made those.
func (t *term) hadBegun(ctx context.Context) bool {
	if t.part.Whole() {
		return true
	}
	begun := true // what cannot be known must not begin anew
	_ = t.untilDone(ctx, "mongodb", func(ctx context.Context) (err error) {
		begun, err = t.divisions.Begun(ctx, t.cfg.Watcher, t.part)
		return err
	})
	return begun
}

// sharedStart is where all slots of a watcher start that has no checkpoint: where the first of them does. A slot that starts
// later would else leave out, or bring again, what the others bring.
func (t *term) sharedStart(ctx context.Context, at bson.Timestamp) (bson.Timestamp, error) {
	if t.part.Whole() {
		return at, nil
	}
	err := t.untilDone(ctx, "mongodb", func(ctx context.Context) (err error) {
		at, err = t.divisions.StartAt(ctx, t.cfg.Watcher, t.part, at)
		return err
	})
	return at, err
}

// begun notes that the slot has a position.
func (t *term) begun(ctx context.Context) error {
	if t.part.Whole() {
		return nil
	}
	return t.untilDone(ctx, "mongodb", func(ctx context.Context) error {
		return t.divisions.Begin(ctx, t.cfg.Watcher, t.part)
	})
}

// passed is what a slot that is no more had delivered of its part: everything up to a place in the stream.
type passed struct {
	part slot.Part
	pos  string
}

func passedOf(doc *lease.Document) []passed {
	var out []passed
	for _, p := range doc.Passed {
		if part, err := slot.Parse(p.Part); err == nil {
			out = append(out, passed{part, p.Pos})
		}
	}
	return out
}

// hadPassed reports whether an earlier slot has delivered the present event, or written down what became of it (N28). The slots
// that a watcher had are drained before it is divided anew, each up to a place of its own; the stream of the new ones begins
// at the lowest of those.
func (p *pump) hadPassed() bool {
	ahead := false
	for _, old := range p.passed {
		if string(p.ev.Data) > old.pos {
			continue
		}
		ahead = true
		if p.ev.HasDocument && old.part.Has(p.ev.Document) {
			return true
		}
	}
	if !ahead {
		p.passed = nil
	}
	return false
}

// forgetPassedLocked removes the places from the document when the watermark has passed them.
func (t *term) forgetPassedLocked(ctx context.Context) {
	if t.passed == nil || t.sweeping.Load() != nil {
		return
	}
	reached, ok := t.disp.Reached()
	if !ok || slices.ContainsFunc(t.passed, func(p passed) bool { return position(reached) <= p.pos }) {
		return
	}
	if t.held.Save(ctx, lease.Update{Current: true, ClearPassed: true}) == nil { // else said by the renewal
		t.passed = nil
	}
}
