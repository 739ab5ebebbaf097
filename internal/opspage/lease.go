package opspage

import (
	"fmt"
	"slices"
	"time"

	"github.com/outrelay/outrelay/internal/admin"
)

// slotField is the field of a form that narrows an action on the lease to one slot of the watcher (N28).
const slotField = "slot"

// whom names what an action on the lease is for.
func (c *call) whom() string {
	if one := c.get(slotField); one != "" {
		return "Slot " + one + " of watcher " + c.v.Watcher
	}
	return "Watcher " + c.v.Watcher
}

// again is an action on the same slots, to take this one back.
func (c *call) again(action, label string) *undo {
	u := &undo{Action: action, Label: label}
	if one := c.get(slotField); one != "" {
		u.Fields = []row{{slotField, one}}
	}
	return u
}

// asOf completes a preview with how the slots stand now that the action is for. There is nothing to do where needed is true
// for none of them.
func (c *call) asOf(p preview, needed func(*admin.Watcher) bool) (preview, error) {
	list, err := c.use.Operator.Slots(c.ctx)
	if err != nil {
		return preview{}, err
	}
	p.Nothing = true
	for i := range list {
		w := &list[i]
		p.Nothing = p.Nothing && !needed(w)
		owner := "nobody owns it"
		if w.Owner != "" && w.ExpiresInMS > 0 {
			owner = "on node " + w.Node
		}
		text := fmt.Sprintf("%s, %s, epoch %d", w.State, owner, w.Epoch)
		if w.Pin != "" {
			text += ", pinned to " + w.Pin
		}
		p.Rows = append(p.Rows, row{"Slot " + w.Slot + " is now", text})
	}
	if len(list) > 1 {
		p.Lines = append(p.Lines, fmt.Sprintf("This is for all %d slots.", len(list)))
	}
	if c.get(slotField) != "" {
		p.Lines = append(p.Lines, "The other slots are left as they are.")
	}
	return p, nil
}

func planPause(c *call) (preview, error) {
	return c.asOf(uncounted("Resume takes it back at any time. Nothing is lost meanwhile: events wait in the outbox and in the oplog.",
		c.whom()+" stops: its owner finishes what is in flight, writes the position and releases. Nobody takes over until it is resumed.",
		"The oplog must hold what is written while it is paused."), func(w *admin.Watcher) bool { return !w.Paused })
}

func doPause(c *call) (notice, error) {
	return notice{Text: c.whom() + " is paused.", Undo: c.again("resume", "Resume it")}, c.use.Operator.Pause(c.ctx)
}

func planResume(c *call) (preview, error) {
	return c.asOf(uncounted("Pause takes it back.", c.whom()+" goes on where it stopped, on whichever node takes it first."),
		func(w *admin.Watcher) bool { return w.Paused })
}

func doResume(c *call) (notice, error) {
	return notice{Text: c.whom() + " goes on.", Undo: c.again("pause", "Pause it again")}, c.use.Operator.Resume(c.ctx)
}

func planPin(c *call) (preview, error) {
	node := c.get("node")
	if node == "" {
		return preview{}, wrong("no node is named")
	}
	return c.asOf(uncounted("Ending the pin takes it back.", c.whom()+" is handed to node "+node+" and stays there while that node lives."),
		func(w *admin.Watcher) bool { return w.Pin != node })
}

func doPin(c *call) (notice, error) {
	return notice{Text: c.whom() + " is pinned to " + c.get("node") + ".", Undo: c.again("unpin", "End the pin")}, c.use.Operator.Pin(c.ctx, c.get("node"))
}

func planUnpin(c *call) (preview, error) {
	return c.asOf(uncounted("A new pin takes it back.", c.whom()+" stays where it is, and any node may take over from there."),
		func(w *admin.Watcher) bool { return w.Pin != "" })
}

func doUnpin(c *call) (notice, error) {
	return notice{Text: "The pin of " + lower(c.whom()) + " has ended."}, c.use.Operator.Pin(c.ctx, "")
}

// lower is a sentence's beginning in its middle.
func lower(s string) string { return string(s[0]|0x20) + s[1:] }

// holdFor is how long a node that stepped down keeps away unless it is said.
const holdFor = 30 * time.Second

// hold is how long a node is to keep away.
func (c *call) hold() (time.Duration, error) {
	d, err := c.span("hold", holdFor)
	if err == nil && d < time.Millisecond {
		err = wrong("a node that keeps away for no time does not step down; give a time such as 30s")
	}
	return d, err
}

func planStepDown(c *call) (preview, error) {
	hold, err := c.hold()
	if err != nil {
		return preview{}, err
	}
	p, err := c.asOf(uncounted("It cannot be taken back, and need not be: after that time the node may take over again.",
		fmt.Sprintf("The owner of %s finishes what is in flight and releases; another node takes over at once. The owner keeps away for %s.", lower(c.whom()), span(hold.Seconds()))),
		func(w *admin.Watcher) bool { return w.Owner != "" && w.ExpiresInMS > 0 })
	if err != nil {
		return p, err
	}
	live, err := c.standbys()
	if err == nil && live < 2 {
		p.Lines = append(p.Lines, "There is no other node that lives: nothing is sent for that time.")
	}
	return p, err
}

// standbys counts the nodes that live and run the watcher, its owners among them.
func (c *call) standbys() (n int, err error) {
	list, err := c.use.Operator.Nodes(c.ctx)
	for i := range list {
		if !list[i].Stale && slices.Contains(list[i].Watchers, c.v.Watcher) {
			n++
		}
	}
	return n, err
}

func doStepDown(c *call) (notice, error) {
	hold, err := c.hold()
	if err != nil {
		return notice{}, err
	}
	return notice{Text: "The owner of " + lower(c.whom()) + " was told to step down, and keeps away for " + span(hold.Seconds()) + "."}, c.use.Operator.StepDown(c.ctx, hold)
}
