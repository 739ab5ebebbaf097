package opspage

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/outrelay/outrelay/internal/admin"
)

// actions by the last part of their address.
var actions = map[string]action{
	"pause":            {title: "Pause", button: "Pause", slots: true, back: "/control", plan: planPause, do: doPause},
	"resume":           {title: "Resume", button: "Resume", slots: true, back: "/control", plan: planResume, do: doResume},
	"pin":              {title: "Pin", button: "Pin", slots: true, back: "/control", plan: planPin, do: doPin},
	"unpin":            {title: "End the pin", button: "End the pin", slots: true, back: "/control", plan: planUnpin, do: doUnpin},
	"step-down":        {title: "Step down", button: "Step down", slots: true, back: "/control", plan: planStepDown, do: doStepDown},
	"node-remove":      {title: "Remove a node", button: "Remove", back: "/nodes", plan: planNodeRemove, do: doNodeRemove},
	"node-release":     {title: "Release a node's slots", button: "Release", back: "/nodes", plan: planNodeRelease, do: doNodeRelease},
	"dead-requeue":     {title: "Requeue dead letters", button: "Requeue", back: "/dead", plan: planRequeue, do: doRequeue},
	"dead-discard":     {title: "Discard dead letters", button: "Discard", danger: true, back: "/dead", plan: planDiscard, do: doDiscard},
	"dead-edit":        {title: "Edit and requeue", button: "Requeue as edited", back: "/dead", plan: planEdit, do: doEdit},
	"retry":            {title: "Retry now", button: "Retry now", back: "/pending", plan: planRetry(false), do: doRetry(false)},
	"reset":            {title: "Reset attempts", button: "Reset attempts", back: "/pending", plan: planRetry(true), do: doRetry(true)},
	"scheduled-cancel": {title: "Cancel scheduled events", button: "Cancel events", danger: true, back: "/scheduled", plan: planCancel, do: doCancel},
	"reschedule":       {title: "Reschedule", button: "Reschedule", back: "/scheduled", plan: planReschedule, do: doReschedule},
	"purge":            {title: "Purge delivered events", button: "Purge", danger: true, back: "/control", plan: planPurge, do: doPurge},
	"replay":           {title: "Replay", button: "Replay", back: "/control", plan: planReplay, do: doReplay},
	"replay-cancel":    {title: "Cancel a replay", button: "Cancel the replay", back: "/control", plan: planReplayCancel, do: doReplayCancel},
	"replay-resume":    {title: "Resume a replay", button: "Resume the replay", back: "/control", plan: planReplayResume, do: doReplayResume},
	"indexes":          {title: "Rebuild indexes", button: "Rebuild", back: "/control", plan: planIndexes, do: doIndexes},
	"clear":            {title: "Clear", button: "Clear for good", danger: true, back: "/control", plan: planClear, do: doClear},
	"inbox-purge":      {title: "Purge an inbox", button: "Purge", danger: true, back: "/inbox", plan: planInboxPurge, do: doInboxPurge},
	"inbox-release":    {title: "Release claims", button: "Release", back: "/inbox", plan: planInboxRelease, do: doInboxRelease},
}

// uncounted is a preview of what touches one thing.
func uncounted(undo string, lines ...string) preview {
	return preview{Lines: lines, Count: -1, Undo: undo}
}

func planNodeRemove(c *call) (preview, error) {
	if c.get("node") == "" {
		return preview{}, wrong("no node is named")
	}
	return uncounted("A node that starts again is on the list again.",
		"Node "+c.get("node")+" is taken off the list, and what it still owns is released. A node that gives signs of life is refused."), nil
}

func doNodeRemove(c *call) (notice, error) {
	return notice{Text: "Node " + c.get("node") + " is off the list."}, c.use.Operator.NodeRemove(c.ctx, c.get("node"), false)
}

func planNodeRelease(c *call) (preview, error) {
	hold, err := c.hold()
	if err == nil && c.get("node") == "" {
		err = wrong("no node is named")
	}
	return uncounted("It cannot be taken back, and need not be: after that time the node may take over again.",
		fmt.Sprintf("Node %s finishes what is in flight and gives up every slot that it owns, for %s. Others take over at once.", c.get("node"), span(hold.Seconds()))), err
}

func doNodeRelease(c *call) (notice, error) {
	hold, err := c.hold()
	if err != nil {
		return notice{}, err
	}
	slots, err := c.use.Operator.NodeRelease(c.ctx, c.get("node"), hold)
	text := "Node " + c.get("node") + " owned nothing."
	if len(slots) > 0 {
		text = "Node " + c.get("node") + " gives up " + strings.Join(slots, ", ") + "."
	}
	return notice{Text: text}, err
}

func planRequeue(c *call) (preview, error) {
	f, err := c.chosen()
	if err != nil {
		return preview{}, err
	}
	out, err := c.use.Letters.Requeue(c.ctx, f, admin.DeadOptions{DryRun: true, IgnoreExpiry: c.get("late") != ""}, nil)
	if err != nil {
		return preview{}, err
	}
	p := preview{Count: out.Matched, Nothing: out.Matched == 0, Undo: "It cannot be taken back: the events are sent again, each as the next delivery of the same event. The letters stay in the list as requeued."}
	p.Lines = []string{are(out.Matched-out.Refused, "letter") + " given back to the outbox and sent at once."}
	if out.Refused > 0 {
		p.Lines = append(p.Lines, are(out.Refused, "letter")+" not deliverable in this form and left alone:")
		for _, w := range out.Why {
			p.Rows = append(p.Rows, row{w.ID + " in " + w.Collection, w.Reason})
		}
	}
	if f.All && f.Empty() {
		p.Lines = append(p.Lines, "No filter is set: this is every letter that was not requeued yet.")
	}
	return p, nil
}

func doRequeue(c *call) (notice, error) {
	f, err := c.chosen()
	if err != nil {
		return notice{}, err
	}
	out, err := c.use.Letters.Requeue(c.ctx, f, admin.DeadOptions{IgnoreExpiry: c.get("late") != ""}, nil)
	n := notice{Text: things(out.Requeued, "letter") + " requeued.", Final: "The events are on their way; that is not taken back. The letters are in the list as requeued."}
	if out.Refused > 0 {
		n.Text = fmt.Sprintf("%s requeued, %s refused.", things(out.Requeued, "letter"), number(out.Refused))
		for _, w := range out.Why {
			n.Rows = append(n.Rows, row{w.ID, w.Reason})
		}
	}
	return n, err
}

func planDiscard(c *call) (preview, error) {
	f, err := c.chosen()
	if err != nil {
		return preview{}, err
	}
	out, err := c.use.Letters.Discard(c.ctx, f, true, nil)
	p := preview{
		Count: out.Matched, Nothing: out.Matched == 0, Undo: "It cannot be taken back: the letters and their payloads are gone, and the events were never delivered. Download them first if anybody may want them.",
		Lines: []string{are(out.Matched, "letter") + " removed for good."},
	}
	if f.All && f.Empty() {
		p.Lines = append(p.Lines, "No filter is set: this is every letter that matches the state alone.")
	}
	if int64(len(f.IDs)) < out.Matched && !f.All {
		p.Lines = append(p.Lines, "Letters of the same event go together: some events that are ticked have died more than once.")
	}
	if out.Matched > 1 {
		p.Phrase = "discard " + strconv.FormatInt(out.Matched, 10)
	}
	return p, err
}

func doDiscard(c *call) (notice, error) {
	f, err := c.chosen()
	if err != nil {
		return notice{}, err
	}
	out, err := c.use.Letters.Discard(c.ctx, f, false, nil)
	return notice{Text: things(out.Discarded, "letter") + " discarded.", Final: "They are gone. The events log says who discarded how many, and by which filter."}, err
}

// things counts.
func things(n int64, what string) string {
	if n == 1 {
		return "1 " + what
	}
	return number(n) + " " + what + "s"
}

// are is things with its verb.
func are(n int64, what string) string {
	if n == 1 {
		return things(n, what) + " is"
	}
	return things(n, what) + " are"
}

// edit is what the form of a letter says is changed: only what was ticked or differs.
func (c *call) edit() (admin.DeadRef, admin.DeadEdit, error) {
	ref, err := c.deadRef()
	if err != nil {
		return ref, admin.DeadEdit{}, err
	}
	version, err := strconv.ParseInt(c.get("version"), 10, 32)
	if err != nil {
		return ref, admin.DeadEdit{}, wrong("the version of the letter is missing")
	}
	e := admin.DeadEdit{Version: int32(version), Fields: map[string]string{}}
	for _, f := range editable {
		was, is := c.q.Get("was."+f.Name), strings.TrimSpace(c.q.Get("set."+f.Name))
		switch {
		case was == is:
		case is == "":
			e.Unset = append(e.Unset, f.Name)
		default:
			e.Fields[f.Name] = is
		}
	}
	if c.get("replace-payload") != "" {
		e.PayloadAs = c.get("as")
		e.Payload = []byte(strings.ReplaceAll(c.q.Get("payload"), "\r\n", "\n")) // a browser's field ends lines so
		if e.PayloadAs == admin.PayloadNull {
			e.Payload = nil
		}
	}
	if c.get("replace-headers") != "" {
		e.Headers = [][2]string{}
		for _, l := range lines(c.q.Get("headers")) {
			k, v, ok := strings.Cut(l, ":")
			if !ok || strings.TrimSpace(k) == "" {
				return ref, e, wrong("headers: %q is not name: value", l)
			}
			e.Headers = append(e.Headers, [2]string{strings.TrimSpace(k), strings.TrimSpace(v)})
		}
	}
	return ref, e, nil
}

func planEdit(c *call) (preview, error) {
	ref, e, err := c.edit()
	if err != nil {
		return preview{}, err
	}
	out, err := c.use.Letters.Edit(c.ctx, ref, e, admin.DeadOptions{DryRun: true, IgnoreExpiry: c.get("late") != ""})
	what := "nothing; it is requeued as it is"
	if len(out.Edited) > 0 {
		what = strings.Join(out.Edited, ", ")
	}
	return preview{
		Count: -1, Undo: "It cannot be taken back: the event is sent again as delivery " + strconv.Itoa(int(out.Delivery)) + ". The letter stays in the list as requeued, as it was before the edit.",
		Lines: []string{"Event " + ref.ID + " goes back to " + out.Collection + " and is sent at once.", "Changed: " + what + "."},
	}, err
}

func doEdit(c *call) (notice, error) {
	ref, e, err := c.edit()
	if err != nil {
		return notice{}, err
	}
	out, err := c.use.Letters.Edit(c.ctx, ref, e, admin.DeadOptions{IgnoreExpiry: c.get("late") != ""})
	text := "Event " + ref.ID + " was requeued"
	if len(out.Edited) > 0 {
		text += "; changed: " + strings.Join(out.Edited, ", ")
	}
	return notice{Text: text + ".", Final: "It is on its way; that is not taken back."}, err
}
