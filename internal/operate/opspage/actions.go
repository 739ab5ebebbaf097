package opspage

import (
	"fmt"
	"slices"
	"strings"

	"github.com/outrelay/outrelay/internal/operate/admin"
)

// actions by the last part of their address.
var actions = map[string]action{
	"acknowledge":      {title: "Acknowledge a problem", button: "Acknowledge", back: "/", plan: planAcknowledge},
	"topic-create":     {title: "Create a topic", button: "Create the topic", back: "/", plan: planTopicCreate},
	"skip":             {title: "Pass over an event", button: "Pass over it", danger: true, slots: true, back: "/control", plan: planSkip},
	"pause":            {title: "Pause", button: "Pause", slots: true, back: "/control", plan: planPause},
	"resume":           {title: "Resume", button: "Resume", slots: true, back: "/control", plan: planResume},
	"pin":              {title: "Pin", button: "Pin", slots: true, back: "/control", plan: planPin},
	"unpin":            {title: "End the pin", button: "End the pin", slots: true, back: "/control", plan: planUnpin},
	"step-down":        {title: "Step down", button: "Step down", slots: true, back: "/control", plan: planStepDown},
	"node-remove":      {title: "Remove a node", button: "Remove", back: "/nodes", plan: planNodeRemove},
	"node-release":     {title: "Release a node's slots", button: "Release", back: "/nodes", plan: planNodeRelease},
	"dead-requeue":     {title: "Requeue dead letters", button: "Requeue", back: "/dead", plan: planRequeue},
	"dead-discard":     {title: "Discard dead letters", button: "Discard", danger: true, back: "/dead", plan: planDiscard},
	"dead-edit":        {title: "Edit and requeue", button: "Requeue as edited", back: "/dead/letter", plan: planEdit},
	"retry":            {title: "Retry now", button: "Retry now", back: "/waiting", plan: planRetry(admin.KeepAttempts)},
	"reset":            {title: "Reset attempts", button: "Reset attempts", back: "/waiting", plan: planRetry(admin.ResetAttempts)},
	"handler-retry":    {title: "Retry messages now", button: "Retry now", back: "/waiting/handlers", plan: planHandlerRetry},
	"handler-discard":  {title: "Discard messages", button: "Discard", danger: true, back: "/waiting/handlers", plan: planHandlerDiscard},
	"scheduled-cancel": {title: "Cancel scheduled events", button: "Cancel events", danger: true, back: "/scheduled", plan: planCancel},
	"reschedule":       {title: "Reschedule", button: "Reschedule", back: "/scheduled", plan: planReschedule},
	"purge":            {title: "Purge delivered events", button: "Purge", danger: true, back: "/control", plan: planPurge},
	"replay":           {title: "Replay", button: "Replay", back: "/control", plan: planReplay},
	"replay-cancel":    {title: "Cancel a replay", button: "Cancel the replay", back: "/control", plan: planReplayCancel},
	"replay-resume":    {title: "Resume a replay", button: "Resume the replay", back: "/control", plan: planReplayResume},
	"clear":            {title: "Clear", button: "Clear for good", danger: true, back: "/control", plan: planClear},
	"inbox-purge":      {title: "Purge an inbox", button: "Purge", danger: true, back: "/inbox", plan: planInboxPurge},
	"inbox-release":    {title: "Release claims", button: "Release", back: "/inbox", plan: planInboxRelease},
}

// newPreview returns the preview of an action without a count.
func newPreview(run func() (notice, error), undo string, lines ...string) preview {
	return preview{Lines: lines, Count: -1, Undo: undo, run: run}
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

// planAcknowledge ends a problem whose cause is over, such as lost history or discarded events.
func planAcknowledge(call *call) (preview, error) {
	overview, err := call.use.Operator.Overview(call.ctx)
	if err != nil {
		return preview{}, err
	}
	id := call.value("problem")
	i := slices.IndexFunc(overview.Problems, func(problem admin.Problem) bool { return problem.Acknowledge == id })
	if id == "" || i < 0 {
		return preview{}, invalidInput("the list has no problem %q that can be acknowledged", id)
	}

	problem := &overview.Problems[i]
	run := func() (notice, error) {
		return notice{Text: problem.Title + ": acknowledged."}, call.use.Operator.Acknowledge(call.ctx, id)
	}
	return newPreview(run, "It cannot be taken back. The audit log keeps who acknowledged it.",
		problem.Title+": "+problem.Detail+".", "The problem leaves the list for everybody."), nil
}

var errNoNode = invalidInput("the request names no node")

func planNodeRemove(call *call) (preview, error) {
	node := call.value("node")
	if node == "" {
		return preview{}, errNoNode
	}
	run := func() (notice, error) {
		return notice{Text: "Node " + node + " is off the list."}, call.use.Nodes.Remove(call.ctx, node, admin.IfStopped)
	}
	return newPreview(run, "A node that starts again is listed again.",
		"Node "+node+" is taken off the list, and the slots that it still owns are released. A live node is rejected."), nil
}

func planNodeRelease(call *call) (preview, error) {
	node := call.value("node")
	hold, err := call.parseHold()
	if err == nil && node == "" {
		err = errNoNode
	}

	run := func() (notice, error) {
		slots, err := call.use.Nodes.Release(call.ctx, node, hold)
		text := "Node " + node + " owned nothing."
		if len(slots) > 0 {
			text = "Node " + node + " gives up " + strings.Join(slots, ", ") + "."
		}
		return notice{Text: text}, err
	}

	effect := fmt.Sprintf("Node %s drains and gives up every slot that it owns, for %s. Other nodes take over at once.",
		node, formatSpan(hold.Seconds()))
	return newPreview(run, undoHold, effect), err
}
