package opspage

import (
	"cmp"
	"fmt"
	"strings"
	"time"

	"github.com/outrelay/outrelay/internal/operate/admin"
)

func planPurge(call *call) (preview, error) {
	keep, err := call.parseDuration("older", 24*time.Hour)
	if err != nil {
		return preview{}, err
	}
	order := admin.Purge{OlderThan: keep, DryRun: true}
	if call.isSet("collection") {
		order.Collections = []string{call.value("collection")}
	}

	out, err := call.use.Operator.Purge(call.ctx, order)
	run := func() (notice, error) {
		order.DryRun, order.Progress = false, call.did
		out, err := call.use.Operator.Purge(call.ctx, order)
		return notice{Text: countNoun(out.Removed, "envelope") + " removed.", Final: "They are gone; they were delivered."}, err
	}
	preview := newPreview(run, "It cannot be taken back: the removed envelopes cannot be replayed or looked up any more.",
		fmt.Sprintf("About %s, delivered and older than %s: removed. Envelopes that are not delivered stay.",
			countNoun(out.Purgeable, "envelope"), formatSpan(out.KeptS)))
	preview.Nothing, preview.Total = out.Purgeable == 0, out.Purgeable

	for _, x := range out.Collections {
		text := countNoun(x.Purgeable, "envelope")
		if x.Held != "" {
			text = "held: " + x.Reason
		}
		preview.Rows = append(preview.Rows, row{x.Collection, text})
	}
	return preview, err
}

func (c *call) parseReplay() (admin.ReplayOrder, error) {
	order := admin.ReplayOrder{
		IDs:            splitLines(c.q.Get("id")),
		Keys:           splitLines(c.q.Get("key")),
		Types:          splitWords(c.value("type")),
		AggregateTypes: splitWords(c.value("aggregate")),
		Topics:         splitWords(c.value("topic")),
		Collections:    splitWords(c.value("collection")),
		Force:          c.isSet("force"),
	}
	var err error
	if order.From, order.To, err = c.parseWindow(); err != nil {
		return order, err
	}

	if text := c.value("rate"); text != "" {
		if _, err := fmt.Sscanf(text, "%g", &order.Rate); err != nil || order.Rate < 0 {
			return order, invalidInput("rate: %q is not a number of events per second", text)
		}
	}
	return order, nil
}

func planReplay(call *call) (preview, error) {
	order, err := call.parseReplay()
	if err != nil {
		return preview{}, err
	}

	run := func() (notice, error) {
		info, err := call.use.Replays.Start(call.ctx, order)
		text := "Replay " + info.ID + " has begun: " + countNoun(info.Found, "event") + "."
		return notice{Text: text, Undo: undoReplay(info.ID)}, err
	}
	plan, err := call.use.Replays.Plan(call.ctx, order)
	preview := newPreview(run, "Sent events cannot be taken back. A running replay can be cancelled.",
		countVerb(plan.Found, "event")+" sent again, each as its next delivery and flagged as redelivered.")
	preview.Nothing = plan.Found == 0
	if plan.LeftOut > 0 {
		preview.Lines = append(preview.Lines, formatNumber(plan.LeftOut)+" are left out: expired, malformed, or for none of the topics.")
	}
	if plan.Unstamped > 0 {
		preview.Lines = append(preview.Lines, formatNumber(plan.Unstamped)+" cannot be sent again: they have no ts, so nothing shows when they were delivered.")
	}
	for _, t := range plan.Topics {
		text := countNoun(t.Found, "record")
		if t.Compacted {
			text += "; the topic is compacted, so an old record replaces the newest one of its key"
		}
		preview.Rows = append(preview.Rows, row{t.Name, text})
	}
	return preview, err
}

// undoReplay returns the action that cancels a replay.
func undoReplay(id string) *undo {
	return &undo{Action: "replay-cancel", Label: "Cancel it", Fields: []row{{"replay", id}}}
}

func planReplayCancel(call *call) (preview, error) {
	id := call.value("replay")
	run := func() (notice, error) {
		return notice{Text: "Replay " + id + " is cancelled."}, call.use.Replays.Cancel(call.ctx, id)
	}
	return newPreview(run, "It can be ordered again.", "Replay "+id+" ends: queued envelopes are sent, the others are not."), nil
}

func planReplayResume(call *call) (preview, error) {
	id := call.value("replay")
	run := func() (notice, error) {
		info, err := call.use.Replays.Resume(call.ctx, id)
		return notice{Text: "Replay " + info.ID + " goes on.", Undo: undoReplay(id)}, err
	}
	return newPreview(run, "It can be cancelled.", "This process goes on with replay "+id+" where it was interrupted."), nil
}

// cleared are the documents that a choice of the form removes.
var cleared = map[string]string{
	admin.ClearEnvelopes: "envelopes: all events in the outboxes, delivered or not",
	admin.ClearHandlers:  "handler_dead: dead letters of handlers",
	"dead":               "dead: dead letters of the relay",
	"inbox":              "inbox: the marks of handled messages; a repeated message is handled again",
	"sagas":              "sagas: the state of all sagas",
	"audit":              "audit: the audit log",
	"replays":            "replays: the list of replays",
}

func describeClear(choice string) string { return cmp.Or(cleared[choice], choice) }

func planClear(call *call) (preview, error) {
	order := admin.ClearOrder{
		What:       call.q["what"],
		Collection: call.value("collection"),
		Confirm:    call.value("_phrase"),
		Force:      call.isSet("force"),
		DryRun:     true,
	}
	out, err := call.use.Operator.Clear(call.ctx, order)
	preview := preview{
		run: func() (notice, error) {
			order.DryRun = false
			out, err := call.use.Operator.Clear(call.ctx, order)
			return notice{Text: countNoun(out.Removed, "document") + " removed.", Final: "They are gone."}, err
		},
		Count:   out.Found,
		Nothing: out.Found == 0,
		Phrase:  out.Confirm,
		Lines:   []string{countNoun(out.Found, "document") + " of " + strings.Join(call.q["what"], ", ") + ": removed for good."},
		Undo:    "It cannot be taken back: all documents of these collections are gone, delivered or not.",
	}
	for _, x := range out.Collections {
		preview.Rows = append(preview.Rows, row{x.Collection + " (" + x.What + ")", countNoun(x.Found, "document")})
	}
	// With force, the user has accepted that relays may be running.
	if err != nil || call.isSet("force") {
		return preview, err
	}

	// A watcher that never ran has no slots, and no relay works for it.
	slots, err := call.use.Lease.Slots(call.ctx)
	if kind, _ := admin.Explain(err); err != nil && kind == admin.FailNotFound {
		return preview, nil
	}
	for i := range slots {
		if slot := &slots[i]; isOwned(slot) {
			preview.Lines = append(preview.Lines, "Node "+slot.Node+" works for it on slot "+slot.Slot+
				": pause the watcher first, or go back and tick that relays may be running.")
			preview.Nothing = true
		}
	}
	return preview, err
}

func planInboxPurge(call *call) (preview, error) {
	older, err := call.parseDuration("older", 7*24*time.Hour)
	if err != nil {
		return preview{}, err
	}
	order := admin.InboxPurge{Database: call.value("database"), Collection: call.value("collection"), OlderThan: older, DryRun: true}

	out, err := call.use.Inboxes.Purge(call.ctx, order)
	run := func() (notice, error) {
		order.DryRun = false
		out, err := call.use.Inboxes.Purge(call.ctx, order)
		return notice{Text: countNoun(out.Removed, "mark") + " removed.", Final: "They are gone."}, err
	}
	preview := newPreview(run, "It cannot be taken back: if such a message arrives again, and no watermark covers it, it is handled again.",
		"About "+countNoun(out.Matched, "mark")+" of handled messages: removed from "+call.value("database")+".")
	preview.Nothing = out.Matched == 0
	return preview, err
}

func planInboxRelease(call *call) (preview, error) {
	release := func(effect admin.Effect) (admin.InboxReleased, error) {
		return call.use.Inboxes.Release(call.ctx, call.value("database"), call.value("collection"), call.isSet("force"), effect)
	}
	out, err := release(admin.DryRun)
	run := func() (notice, error) {
		out, err := release(admin.ForReal)
		return notice{Text: countNoun(out.Released, "claim") + " released."}, err
	}
	preview := newPreview(run, "It cannot be taken back. A consumer that holds a claim cannot finish that message.",
		countNoun(out.Matched, "claimed message")+" can be handled again at once.")
	preview.Nothing = out.Matched == 0

	if out.Live > 0 {
		preview.Lines = append(preview.Lines, countVerb(out.Live, "claim")+" live.")
		if !call.isSet("force") {
			preview.Lines = append(preview.Lines, "If the consumer has stopped for certain, go back and tick live claims too. "+
				"Otherwise wait until the claims expire.")
			preview.Nothing = true
		}
	}
	return preview, err
}
