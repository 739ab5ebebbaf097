package opspage

import (
	"fmt"
	"strings"
	"time"

	"github.com/outrelay/outrelay/internal/operate/admin"
)

func planPurge(c *call) (preview, error) {
	keep, err := c.parseDuration("older", 24*time.Hour)
	if err != nil {
		return preview{}, err
	}
	order := admin.Purge{OlderThan: keep, DryRun: true}
	if c.isSet("collection") {
		order.Collections = []string{c.value("collection")}
	}

	out, err := c.use.Operator.Purge(c.ctx, order)
	run := func() (notice, error) {
		order.DryRun = false
		out, err := c.use.Operator.Purge(c.ctx, order)
		return notice{Text: countNoun(out.Removed, "envelope") + " removed.", Final: "They are gone; they were delivered."}, err
	}
	p := newPreview(run, "It cannot be taken back: the removed envelopes cannot be replayed or looked up any more.",
		fmt.Sprintf("About %s, delivered and older than %s: removed. Envelopes that are not delivered stay.",
			countNoun(out.Purgeable, "envelope"), formatSpan(out.KeptS)))
	p.Nothing = out.Purgeable == 0

	for _, x := range out.Collections {
		text := countNoun(x.Purgeable, "envelope")
		if x.Held != "" {
			text = "held: " + x.Reason
		}
		p.Rows = append(p.Rows, row{x.Collection, text})
	}
	return p, err
}

func (c *call) parseReplay() (admin.ReplayOrder, error) {
	o := admin.ReplayOrder{
		IDs:            splitLines(c.q.Get("id")),
		Keys:           splitLines(c.q.Get("key")),
		Types:          splitWords(c.value("type")),
		AggregateTypes: splitWords(c.value("aggregate")),
		Topics:         splitWords(c.value("topic")),
		Collections:    splitWords(c.value("collection")),
		Force:          c.isSet("force"),
	}
	var err error
	if o.From, o.To, err = c.parseWindow(); err != nil {
		return o, err
	}

	if text := c.value("rate"); text != "" {
		if _, err := fmt.Sscanf(text, "%g", &o.Rate); err != nil || o.Rate < 0 {
			return o, invalidInput("rate: %q is not a number of events per second", text)
		}
	}
	return o, nil
}

func planReplay(c *call) (preview, error) {
	o, err := c.parseReplay()
	if err != nil {
		return preview{}, err
	}

	run := func() (notice, error) {
		info, err := c.use.Replays.Start(c.ctx, o)
		text := "Replay " + info.ID + " has begun: " + countNoun(info.Found, "event") + "."
		return notice{Text: text, Undo: undoReplay(info.ID)}, err
	}
	plan, err := c.use.Replays.Plan(c.ctx, o)
	p := newPreview(run, "Sent events cannot be taken back. A running replay can be cancelled.",
		countVerb(plan.Found, "event")+" sent again, each as its next delivery and flagged as redelivered.")
	p.Nothing = plan.Found == 0
	if plan.LeftOut > 0 {
		p.Lines = append(p.Lines, formatNumber(plan.LeftOut)+" are left out: expired, malformed, or for none of the topics.")
	}
	if plan.Unstamped > 0 {
		p.Lines = append(p.Lines, formatNumber(plan.Unstamped)+" cannot be sent again: they have no ts, so nothing shows when they were delivered.")
	}
	for _, t := range plan.Topics {
		text := countNoun(t.Found, "record")
		if t.Compacted {
			text += "; the topic is compacted, so an old record replaces the newest one of its key"
		}
		p.Rows = append(p.Rows, row{t.Name, text})
	}
	return p, err
}

// undoReplay returns the action that cancels a replay.
func undoReplay(id string) *undo {
	return &undo{Action: "replay-cancel", Label: "Cancel it", Fields: []row{{"replay", id}}}
}

func planReplayCancel(c *call) (preview, error) {
	id := c.value("replay")
	run := func() (notice, error) {
		return notice{Text: "Replay " + id + " is cancelled."}, c.use.Replays.Cancel(c.ctx, id)
	}
	return newPreview(run, "It can be ordered again.", "Replay "+id+" ends: queued envelopes are sent, the others are not."), nil
}

func planReplayResume(c *call) (preview, error) {
	id := c.value("replay")
	run := func() (notice, error) {
		info, err := c.use.Replays.Resume(c.ctx, id)
		return notice{Text: "Replay " + info.ID + " goes on.", Undo: undoReplay(id)}, err
	}
	return newPreview(run, "It can be cancelled.", "This process goes on with replay "+id+" where it was interrupted."), nil
}

func planClear(c *call) (preview, error) {
	order := admin.ClearOrder{
		What:       c.q["what"],
		Collection: c.value("collection"),
		Confirm:    c.value("_phrase"),
		Force:      c.isSet("force"),
		DryRun:     true,
	}
	out, err := c.use.Operator.Clear(c.ctx, order)
	p := preview{
		run: func() (notice, error) {
			order.DryRun = false
			out, err := c.use.Operator.Clear(c.ctx, order)
			return notice{Text: countNoun(out.Removed, "document") + " removed.", Final: "They are gone."}, err
		},
		Count:   out.Found,
		Nothing: out.Found == 0,
		Phrase:  out.Confirm,
		Lines:   []string{countNoun(out.Found, "document") + " of " + strings.Join(c.q["what"], ", ") + ": removed for good."},
		Undo:    "It cannot be taken back: all documents of these collections are gone, delivered or not.",
	}
	for _, x := range out.Collections {
		p.Rows = append(p.Rows, row{x.Collection + " (" + x.What + ")", countNoun(x.Found, "document")})
	}
	// With force, the user has accepted that relays may be running.
	if err != nil || c.isSet("force") {
		return p, err
	}

	// A watcher that never ran has no slots, and no relay works for it.
	slots, err := c.use.Lease.Slots(c.ctx)
	if kind, _ := admin.Explain(err); err != nil && kind == admin.FailNotFound {
		return p, nil
	}
	for i := range slots {
		if w := &slots[i]; isOwned(w) {
			p.Lines = append(p.Lines, "Node "+w.Node+" works for it on slot "+w.Slot+
				": pause the watcher first, or go back and tick that relays may be running.")
			p.Nothing = true
		}
	}
	return p, err
}

func planInboxPurge(c *call) (preview, error) {
	older, err := c.parseDuration("older", 7*24*time.Hour)
	if err != nil {
		return preview{}, err
	}
	order := admin.InboxPurge{Database: c.value("database"), Collection: c.value("collection"), OlderThan: older, DryRun: true}

	out, err := c.use.Inboxes.Purge(c.ctx, order)
	run := func() (notice, error) {
		order.DryRun = false
		out, err := c.use.Inboxes.Purge(c.ctx, order)
		return notice{Text: countNoun(out.Removed, "marker") + " removed.", Final: "They are gone."}, err
	}
	p := newPreview(run, "It cannot be taken back: if such a message arrives again, and no watermark covers it, it is handled again.",
		"About "+countNoun(out.Matched, "marker")+" of handled messages: removed from "+c.value("database")+".")
	p.Nothing = out.Matched == 0
	return p, err
}

func planInboxRelease(c *call) (preview, error) {
	release := func(dryRun bool) (admin.InboxReleased, error) {
		return c.use.Inboxes.Release(c.ctx, c.value("database"), c.value("collection"), c.isSet("force"), dryRun)
	}
	out, err := release(true)
	run := func() (notice, error) {
		out, err := release(false)
		return notice{Text: countNoun(out.Released, "claim") + " released."}, err
	}
	p := newPreview(run, "It cannot be taken back. A consumer that holds a claim cannot finish that message.",
		countNoun(out.Matched, "claimed message")+" can be handled again at once.")
	p.Nothing = out.Matched == 0

	if out.Live > 0 {
		p.Lines = append(p.Lines, countVerb(out.Live, "claim")+" live.")
		if !c.isSet("force") {
			p.Lines = append(p.Lines, "If the consumer has stopped for certain, go back and tick live claims too. "+
				"Otherwise wait until the claims expire.")
			p.Nothing = true
		}
	}
	return p, err
}
