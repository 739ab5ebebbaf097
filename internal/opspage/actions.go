package opspage

import (
	"fmt"
	"strings"
)

// actions by the last part of their address.
var actions = map[string]action{
	"pause":            {title: "Pause", button: "Pause", slots: true, back: "/control", plan: planPause, run: runPause},
	"resume":           {title: "Resume", button: "Resume", slots: true, back: "/control", plan: planResume, run: runResume},
	"pin":              {title: "Pin", button: "Pin", slots: true, back: "/control", plan: planPin, run: runPin},
	"unpin":            {title: "End the pin", button: "End the pin", slots: true, back: "/control", plan: planUnpin, run: runUnpin},
	"step-down":        {title: "Step down", button: "Step down", slots: true, back: "/control", plan: planStepDown, run: runStepDown},
	"node-remove":      {title: "Remove a node", button: "Remove", back: "/nodes", plan: planNodeRemove, run: runNodeRemove},
	"node-release":     {title: "Release a node's slots", button: "Release", back: "/nodes", plan: planNodeRelease, run: runNodeRelease},
	"dead-requeue":     {title: "Requeue dead letters", button: "Requeue", back: "/dead", plan: planRequeue, run: runRequeue},
	"dead-discard":     {title: "Discard dead letters", button: "Discard", danger: true, back: "/dead", plan: planDiscard, run: runDiscard},
	"dead-edit":        {title: "Edit and requeue", button: "Requeue as edited", back: "/dead", plan: planEdit, run: runEdit},
	"retry":            {title: "Retry now", button: "Retry now", back: "/pending", plan: planRetry(false), run: runRetry(false)},
	"reset":            {title: "Reset attempts", button: "Reset attempts", back: "/pending", plan: planRetry(true), run: runRetry(true)},
	"scheduled-cancel": {title: "Cancel scheduled events", button: "Cancel events", danger: true, back: "/scheduled", plan: planCancel, run: runCancel},
	"reschedule":       {title: "Reschedule", button: "Reschedule", back: "/scheduled", plan: planReschedule, run: runReschedule},
	"purge":            {title: "Purge delivered events", button: "Purge", danger: true, back: "/control", plan: planPurge, run: runPurge},
	"replay":           {title: "Replay", button: "Replay", back: "/control", plan: planReplay, run: runReplay},
	"replay-cancel":    {title: "Cancel a replay", button: "Cancel the replay", back: "/control", plan: planReplayCancel, run: runReplayCancel},
	"replay-resume":    {title: "Resume a replay", button: "Resume the replay", back: "/control", plan: planReplayResume, run: runReplayResume},
	"indexes":          {title: "Rebuild indexes", button: "Rebuild", back: "/control", plan: planIndexes, run: runIndexes},
	"clear":            {title: "Clear", button: "Clear for good", danger: true, back: "/control", plan: planClear, run: runClear},
	"inbox-purge":      {title: "Purge an inbox", button: "Purge", danger: true, back: "/inbox", plan: planInboxPurge, run: runInboxPurge},
	"inbox-release":    {title: "Release claims", button: "Release", back: "/inbox", plan: planInboxRelease, run: runInboxRelease},
}

// newPreview returns the preview of an action without a count.
func newPreview(undo string, lines ...string) preview {
	return preview{Lines: lines, Count: -1, Undo: undo}
}

// countNoun returns a count with its noun.
func countNoun(n int64, noun string) string {
	if n == 1 {
		return "1 " + noun
	}
	return formatNumber(n) + " " + noun + "s"
}

// countVerb returns a count with its noun and "is" or "are".
func countVerb(n int64, noun string) string {
	if n == 1 {
		return countNoun(n, noun) + " is"
	}
	return countNoun(n, noun) + " are"
}

var errNoNode = invalidInput("the request names no node")

func planNodeRemove(c *call) (preview, error) {
	if !c.isSet("node") {
		return preview{}, errNoNode
	}
	return newPreview("A node that starts again is listed again.",
		"Node "+c.value("node")+" is taken off the list, and the slots that it still owns are released. A live node is rejected."), nil
}

func runNodeRemove(c *call) (notice, error) {
	node := c.value("node")
	return notice{Text: "Node " + node + " is off the list."}, c.use.Nodes.Remove(c.ctx, node, false)
}

func planNodeRelease(c *call) (preview, error) {
	hold, err := c.parseHold()
	if err == nil && !c.isSet("node") {
		err = errNoNode
	}
	text := fmt.Sprintf("Node %s drains and gives up every slot that it owns, for %s. Other nodes take over at once.",
		c.value("node"), formatSpan(hold.Seconds()))
	return newPreview(undoHold, text), err
}

func runNodeRelease(c *call) (notice, error) {
	hold, err := c.parseHold()
	if err != nil {
		return notice{}, err
	}

	node := c.value("node")
	slots, err := c.use.Nodes.Release(c.ctx, node, hold)
	text := "Node " + node + " owned nothing."
	if len(slots) > 0 {
		text = "Node " + node + " gives up " + strings.Join(slots, ", ") + "."
	}
	return notice{Text: text}, err
}
