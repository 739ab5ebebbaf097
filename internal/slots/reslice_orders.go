package slots

import (
	"slices"

	"github.com/outrelay/outrelay/internal/lease"
	"github.com/outrelay/outrelay/internal/slot"
)

// slotOrders contains the orders of operators for the slots of a new division.
type slotOrders struct {
	watcher  string
	controls map[string]lease.Control // by id
	parts    []slot.Range
	unpinned []string
}

// inheritOrders derives the orders from the orders for the old slots (N28). Each new slot considers
// the old slots with some of its keys. It stays paused if an operator had paused any of them. It
// avoids the node that has to stay away longest. It keeps a pin if all of them were pinned to the
// same node.
func (r *resliceRun) inheritOrders(old []lease.Document) slotOrders {
	o := slotOrders{watcher: r.cfg.Watcher, controls: map[string]lease.Control{}, parts: slot.Ranges(r.Slots)}
	for _, p := range o.parts {
		had := slices.DeleteFunc(slices.Clone(old), func(d lease.Document) bool {
			_, q, _ := slot.ParseID(d.ID)
			return !p.Overlaps(q)
		})

		longest := slices.MaxFunc(had, func(a, b lease.Document) int {
			return a.Control.StepDownUntil.Compare(b.Control.StepDownUntil)
		})
		c := lease.Control{
			Paused:        slices.ContainsFunc(had, func(d lease.Document) bool { return slices.Contains(r.paused, d.ID) }),
			Pin:           had[0].Control.Pin,
			StepDownUntil: longest.Control.StepDownUntil,
			StepDownNode:  longest.Control.StepDownNode,
		}
		if slices.ContainsFunc(had, func(d lease.Document) bool { return d.Control.Pin != c.Pin }) {
			c.Pin = ""
		}
		o.controls[p.ID(o.watcher)] = c

		for _, d := range had {
			if d.Control.Pin != c.Pin && !slices.Contains(o.unpinned, d.ID) {
				o.unpinned = append(o.unpinned, d.ID)
			}
		}
	}
	return o
}

// addTo sets the new slots in the report.
func (o slotOrders) addTo(rep *ResliceReport) {
	rep.New = []NewSlot{}
	rep.Unpinned = []string{}
	for _, p := range o.parts {
		c := o.controls[p.ID(o.watcher)]
		rep.New = append(rep.New, NewSlot{Slot: p.String(), Paused: c.Paused, Pin: c.Pin})
	}
	for _, id := range o.unpinned {
		rep.Unpinned = append(rep.Unpinned, id[len(o.watcher)+1:])
	}
}
