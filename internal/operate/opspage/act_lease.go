package opspage

import (
	"fmt"
	"slices"
	"time"

	"github.com/outrelay/outrelay/internal/operate/admin"
)

// slotField is the form field that restricts an action on the lease to one slot of the watcher (N28).
const slotField = "slot"

// leaseName names the slots to which an action on the lease applies.
func (c *call) leaseName() string {
	if c.isSet(slotField) {
		return "Slot " + c.value(slotField) + " of watcher " + c.v.Watcher
	}
	return "Watcher " + c.v.Watcher
}

// undoLease returns an action on the same slots, to revert this one.
func (c *call) undoLease(action, label string) *undo {
	u := &undo{Action: action, Label: label}
	if c.isSet(slotField) {
		u.Fields = []row{{slotField, c.value(slotField)}}
	}
	return u
}

// addSlots adds the current state of the affected slots to a preview. There is nothing to do if
// needed is false for all of them.
func (c *call) addSlots(p preview, needed func(*admin.SlotStatus) bool) (preview, error) {
	list, err := c.use.Lease.Slots(c.ctx)
	if err != nil {
		return preview{}, err
	}

	p.Nothing = true
	for i := range list {
		w := &list[i]
		if needed(w) {
			p.Nothing = false
		}

		owner := "without an owner"
		if isOwned(w) {
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
	if c.isSet(slotField) {
		p.Lines = append(p.Lines, "The other slots are left as they are.")
	}
	return p, nil
}

// isOwned reports whether the lease of the slot has not expired.
func isOwned(w *admin.SlotStatus) bool { return w.Owner != "" && w.ExpiresInMS > 0 }

func planPause(c *call) (preview, error) {
	run := func() (notice, error) {
		n := notice{Text: c.leaseName() + " is paused.", Undo: c.undoLease("resume", "Resume it")}
		return n, c.use.Lease.Pause(c.ctx)
	}
	p := newPreview(run, "Resume reverts it at any time. No event is lost: events wait in the outbox and in the oplog.",
		c.leaseName()+" stops: its owner drains, writes the position and releases the lease. No node takes over until it is resumed.",
		"The oplog must hold all changes that are written while it is paused.")
	return c.addSlots(p, func(w *admin.SlotStatus) bool { return !w.Paused })
}

func planResume(c *call) (preview, error) {
	run := func() (notice, error) {
		n := notice{Text: c.leaseName() + " goes on.", Undo: c.undoLease("pause", "Pause it again")}
		return n, c.use.Lease.Resume(c.ctx)
	}
	p := newPreview(run, "Pause reverts it.", c.leaseName()+" goes on where it stopped, on the node that acquires the lease first.")
	return c.addSlots(p, func(w *admin.SlotStatus) bool { return w.Paused })
}

func planPin(c *call) (preview, error) {
	node := c.value("node")
	if node == "" {
		return preview{}, errNoNode
	}
	run := func() (notice, error) {
		n := notice{Text: c.leaseName() + " is pinned to " + node + ".", Undo: c.undoLease("unpin", "End the pin")}
		return n, c.use.Lease.Pin(c.ctx, node)
	}
	p := newPreview(run, "Ending the pin reverts it.",
		c.leaseName()+" is handed to node "+node+" and stays there while that node is alive.")
	return c.addSlots(p, func(w *admin.SlotStatus) bool { return w.Pin != node })
}

func planUnpin(c *call) (preview, error) {
	run := func() (notice, error) {
		return notice{Text: "The pin of " + lowerFirst(c.leaseName()) + " has ended."}, c.use.Lease.Pin(c.ctx, "")
	}
	p := newPreview(run, "A new pin reverts it.", c.leaseName()+" stays where it is, and any node may take over from there.")
	return c.addSlots(p, func(w *admin.SlotStatus) bool { return w.Pin != "" })
}

// lowerFirst makes the first letter of an ASCII text lower case.
func lowerFirst(s string) string { return string(s[0]|0x20) + s[1:] }

// defaultHold is how long a node that stepped down does not acquire the lease by default.
const defaultHold = 30 * time.Second

func (c *call) parseHold() (time.Duration, error) {
	hold, err := c.parseDuration("hold", defaultHold)
	if err == nil && hold < time.Millisecond {
		err = invalidInput("a step-down for no time has no effect; use a time such as 30s")
	}
	return hold, err
}

// undoHold is the text of an action that expires.
const undoHold = "It cannot be taken back, and need not be: after that time the node may take over again."

func planStepDown(c *call) (preview, error) {
	hold, err := c.parseHold()
	if err != nil {
		return preview{}, err
	}

	run := func() (notice, error) {
		text := fmt.Sprintf("The owner of %s steps down, and does not take over again for %s.",
			lowerFirst(c.leaseName()), formatSpan(hold.Seconds()))
		return notice{Text: text}, c.use.Lease.StepDown(c.ctx, hold)
	}
	text := fmt.Sprintf("The owner of %s drains and releases; another node takes over at once. The owner does not take over again for %s.",
		lowerFirst(c.leaseName()), formatSpan(hold.Seconds()))
	p, err := c.addSlots(newPreview(run, undoHold, text), isOwned)
	if err != nil {
		return p, err
	}

	live, err := c.countLiveNodes()
	if err == nil && live < 2 {
		p.Lines = append(p.Lines, "There is no other node that lives: nothing is sent for that time.")
	}
	return p, err
}

// countLiveNodes counts the live nodes that run the watcher, including its owners.
func (c *call) countLiveNodes() (n int, err error) {
	list, err := c.use.Nodes.List(c.ctx)
	for i := range list {
		if !list[i].Stale && slices.Contains(list[i].Watchers, c.v.Watcher) {
			n++
		}
	}
	return n, err
}
