package opspage

import (
	"errors"
	"fmt"
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
	undo := &undo{Action: action, Label: label}
	if c.isSet(slotField) {
		undo.Fields = []row{{slotField, c.value(slotField)}}
	}
	return undo
}

// addSlots adds the current state of the affected slots to a preview. There is nothing to do if
// needed is false for all of them.
func (c *call) addSlots(shown preview, needed func(*admin.SlotStatus) bool) (preview, error) {
	list, err := c.use.Lease.Slots(c.ctx)
	if err != nil {
		return preview{}, err
	}

	shown.Nothing = true
	for i := range list {
		slot := &list[i]
		if needed(slot) {
			shown.Nothing = false
		}

		owner := "without an owner"
		if isOwned(slot) {
			owner = "on node " + slot.Node
		}
		text := fmt.Sprintf("%s, %s, epoch %d", slot.State, owner, slot.Epoch)
		if slot.Pin != "" {
			text += ", pinned to " + slot.Pin
		}
		shown.Rows = append(shown.Rows, row{"Slot " + slot.Slot + " is now", text})
	}

	if len(list) > 1 {
		shown.Lines = append(shown.Lines, fmt.Sprintf("This is for all %d slots.", len(list)))
	}
	if c.isSet(slotField) {
		shown.Lines = append(shown.Lines, "The other slots are left as they are.")
	}
	return shown, nil
}

// isOwned reports whether the lease of the slot has not expired.
func isOwned(slot *admin.SlotStatus) bool { return slot.Owner != "" && slot.ExpiresInMS > 0 }

func planPause(call *call) (preview, error) {
	run := func() (notice, error) {
		n := notice{Text: call.leaseName() + " is paused.", Undo: call.undoLease("resume", "Resume it")}
		return n, call.use.Lease.Pause(call.ctx)
	}
	preview := newPreview(run, "Resume reverts it at any time. No event is lost: events wait in the outbox and in the oplog.",
		call.leaseName()+" stops: its owner drains, writes the position and releases the lease. No node takes over until it is resumed.",
		"The oplog must hold all changes that are written while it is paused.")
	return call.addSlots(preview, func(slot *admin.SlotStatus) bool { return !slot.Paused })
}

func planResume(call *call) (preview, error) {
	run := func() (notice, error) {
		n := notice{Text: call.leaseName() + " goes on.", Undo: call.undoLease("pause", "Pause it again")}
		return n, call.use.Lease.Resume(call.ctx)
	}
	preview := newPreview(run, "Pause reverts it.", call.leaseName()+" goes on where it stopped, on the node that acquires the lease first.")
	return call.addSlots(preview, func(slot *admin.SlotStatus) bool { return slot.Paused })
}

func planPin(call *call) (preview, error) {
	node := call.value("node")
	if node == "" {
		return preview{}, errNoNode
	}
	run := func() (notice, error) {
		n := notice{Text: call.leaseName() + " is pinned to " + node + ".", Undo: call.undoLease("unpin", "End the pin")}
		return n, call.use.Lease.Pin(call.ctx, node)
	}
	preview := newPreview(run, "Ending the pin reverts it.",
		call.leaseName()+" is handed to node "+node+" and stays there while that node is alive.")
	return call.addSlots(preview, func(slot *admin.SlotStatus) bool { return slot.Pin != node })
}

func planUnpin(call *call) (preview, error) {
	run := func() (notice, error) {
		return notice{Text: "The pin of " + lowerFirst(call.leaseName()) + " has ended."}, call.use.Lease.Pin(call.ctx, "")
	}
	preview := newPreview(run, "A new pin reverts it.", call.leaseName()+" stays where it is, and any node may take over from there.")
	return call.addSlots(preview, func(slot *admin.SlotStatus) bool { return slot.Pin != "" })
}

// lowerFirst makes the first letter of an ASCII text lower case.
func lowerFirst(text string) string { return string(text[0]|0x20) + text[1:] }

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

func planStepDown(call *call) (preview, error) {
	hold, err := call.parseHold()
	if err != nil {
		return preview{}, err
	}

	// The check is part of each preview. So if the last standby stops before the confirmation, the page shows the question again.
	missing := call.use.Lease.CheckStandby(call.ctx, hold)
	if missing != nil && !errors.Is(missing, admin.ErrNoStandby) {
		return preview{}, missing
	}

	order := admin.StepDownOrder{Hold: hold, Force: missing != nil}
	run := func() (notice, error) {
		text := fmt.Sprintf("The owner of %s steps down, and does not take over again for %s.",
			lowerFirst(call.leaseName()), formatSpan(hold.Seconds()))
		return notice{Text: text}, call.use.Lease.StepDown(call.ctx, order)
	}
	effect := "another node takes over at once"
	if missing != nil {
		effect = missing.Error()
	}
	text := fmt.Sprintf("The owner of %s drains and releases; %s. The owner does not take over again for %s.",
		lowerFirst(call.leaseName()), effect, formatSpan(hold.Seconds()))

	preview := newPreview(run, undoHold, text)
	if missing != nil {
		preview.Phrase = "stop " + call.v.Watcher
	}
	return call.addSlots(preview, isOwned)
}
