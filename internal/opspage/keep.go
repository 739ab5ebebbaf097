package opspage

import (
	"fmt"
	"strings"
	"time"

	"github.com/outrelay/outrelay/internal/admin"
)

// retryAtMost is how many envelopes one action on failed ones is for.
const retryAtMost = 10_000

// failedState is that of envelopes that were refused for their own reason.
const failedState = "retry"

// retried is what an action on failed envelopes is for: those that are ticked, or all that the filter finds, as their ids.
func (c *call) retried() (collection string, ids []string, err error) {
	collection = c.get("collection")
	switch c.get("scope") {
	case "ticked":
		if ids = c.q["pick"]; len(ids) == 0 {
			err = wrong("no envelope is ticked; tick some, or choose all that match")
		}
	case "all":
		ids, err = c.failing(admin.WaitingFilter{Collection: collection, State: c.get("state"), Topic: c.get("topic"), Key: c.get("key")})
	default:
		err = wrong("it is not said whether the ticked envelopes are meant or all that match")
	}
	return collection, ids, err
}

// failing are the ids of the envelopes that a filter finds and that are to be tried again.
func (c *call) failing(f admin.WaitingFilter) (ids []string, err error) {
	if f.State != "" && f.State != failedState {
		return nil, wrong("envelopes that are %s have not failed; what they wait for brings them on", f.State)
	}
	f.State = failedState
	for after := ""; ; {
		page, err := c.use.Waiting.Page(c.ctx, f, admin.MaxPage, after)
		if err != nil {
			return nil, err
		}
		for i := range page.Envelopes {
			ids = append(ids, page.Envelopes[i].ID)
		}
		if after = page.Next; after == "" || len(ids) >= retryAtMost {
			return ids[:min(len(ids), retryAtMost)], nil
		}
	}
}

func (c *call) failed(reset, dry bool) (admin.FailedOutcome, error) {
	collection, ids, err := c.retried()
	switch {
	case err != nil:
		return admin.FailedOutcome{}, err
	case len(ids) == 0: // which would mean others to the use-case
		return admin.FailedOutcome{DryRun: dry}, nil
	case reset:
		return c.use.Waiting.Reset(c.ctx, collection, ids, dry)
	}
	return c.use.Waiting.Retry(c.ctx, collection, ids, dry)
}

func planRetry(reset bool) func(*call) (preview, error) {
	return func(c *call) (preview, error) {
		out, err := c.failed(reset, true)
		p := preview{Count: out.Failed, Nothing: out.Failed == 0, Undo: "It cannot be taken back."}
		p.Lines = []string{are(out.Failed, "failed envelope") + " due now; the attempts that failed still count."}
		if reset {
			p.Lines = []string{are(out.Failed, "failed envelope") + " tried again at once, and as often as new ones."}
		}
		if left := int64(out.Given) - out.Failed; left > 0 {
			p.Lines = append(p.Lines, number(left)+" of those that are meant wait for another reason and are left alone.")
		}
		if out.Given >= retryAtMost {
			p.Lines = append(p.Lines, "These are the first "+number(retryAtMost)+"; do it again for those that are left.")
		}
		return p, err
	}
}

func doRetry(reset bool) func(*call) (notice, error) {
	return func(c *call) (notice, error) {
		out, err := c.failed(reset, false)
		return notice{Text: are(out.Done, "envelope") + " tried again now."}, err
	}
}

func (c *call) scheduledChosen() (admin.ScheduledFilter, error) {
	f, err := c.scheduledFilter()
	if err != nil {
		return f, err
	}
	switch c.get("scope") {
	case "ticked":
		if f.IDs = c.q["pick"]; len(f.IDs) == 0 {
			return f, wrong("no event is ticked; tick some, or choose all that match")
		}
	case "all":
		f.All = true
	default:
		return f, wrong("it is not said whether the ticked events are meant or all that match")
	}
	return f, nil
}

func planCancel(c *call) (preview, error) {
	f, err := c.scheduledChosen()
	if err != nil {
		return preview{}, err
	}
	page, err := c.use.Schedule.List(c.ctx, f, 1, "")
	p := preview{
		Count: page.Total, Nothing: page.Total == 0, Undo: "It cannot be taken back: they are never sent, and have to be appended again.",
		Lines: []string{are(page.Total, "scheduled event") + " cancelled. Those that are on their way by then are sent."},
	}
	if f.Empty() {
		p.Lines = append(p.Lines, "No filter is set: this is every scheduled event.")
	}
	if page.Total > 1 {
		p.Phrase = fmt.Sprintf("cancel %d", page.Total)
	}
	return p, err
}

func doCancel(c *call) (notice, error) {
	f, err := c.scheduledChosen()
	if err != nil {
		return notice{}, err
	}
	n, err := c.use.Schedule.Cancel(c.ctx, f, nil)
	return notice{Text: things(n, "scheduled event") + " cancelled.", Final: "They are gone; the service that scheduled them can append them again."}, err
}

// moved are the ticked events and the time they are to get.
func (c *call) moved() (admin.ScheduledFilter, time.Time, error) {
	f := admin.ScheduledFilter{Collection: c.get("collection"), IDs: c.q["pick"]}
	to, err := c.instant("due")
	switch {
	case err != nil:
	case len(f.IDs) == 0:
		err = wrong("no event is ticked")
	case to.IsZero():
		err = wrong("due: no time says when they are to be sent")
	}
	return f, to, err
}

func planReschedule(c *call) (preview, error) {
	f, to, err := c.moved()
	return preview{
		Count: int64(len(f.IDs)), Undo: "Another time can be given in the same way, as long as no watcher has taken them.",
		Lines: []string{are(int64(len(f.IDs)), "event") + " due at " + instant(to) + "."},
	}, err
}

func doReschedule(c *call) (notice, error) {
	f, to, err := c.moved()
	if err != nil {
		return notice{}, err
	}
	out, err := c.use.Schedule.Move(c.ctx, f, to)
	n := notice{Text: are(int64(len(out.Moved)), "event") + " due at " + instant(to) + "."}
	for _, id := range out.NotScheduled {
		n.Rows = append(n.Rows, row{id, "not scheduled any more: cancelled, or on its way"})
	}
	return n, err
}

func (c *call) purge(dry bool) (admin.PurgeReport, error) {
	keep, err := c.span("older", 24*time.Hour)
	if err != nil {
		return admin.PurgeReport{}, err
	}
	o := admin.Purge{OlderThan: keep, DryRun: dry}
	if one := c.get("collection"); one != "" {
		o.Collections = []string{one}
	}
	return c.use.Operator.Purge(c.ctx, o)
}

func planPurge(c *call) (preview, error) {
	out, err := c.purge(true)
	p := preview{
		Count: -1, Nothing: out.Purgeable == 0, Undo: "It cannot be taken back: what is removed cannot be replayed or looked up any more.",
		Lines: []string{fmt.Sprintf("About %s, delivered and older than %s: removed. Nothing goes that is not delivered.", things(out.Purgeable, "envelope"), span(out.KeptS))},
	}
	for _, one := range out.Collections {
		text := things(one.Purgeable, "envelope")
		if one.Held != "" {
			text = "held: " + one.Reason
		}
		p.Rows = append(p.Rows, row{one.Collection, text})
	}
	return p, err
}

func doPurge(c *call) (notice, error) {
	out, err := c.purge(false)
	return notice{Text: things(out.Removed, "envelope") + " removed.", Final: "They are gone; they were delivered."}, err
}

func (c *call) replay() (admin.ReplayOrder, error) {
	o := admin.ReplayOrder{
		IDs: lines(c.q.Get("id")), Keys: lines(c.q.Get("key")), Types: words(c.get("type")), AggregateTypes: words(c.get("aggregate")),
		Topics: words(c.get("topic")), Collections: words(c.get("collection")), Force: c.get("force") != "",
	}
	var err error
	if o.From, o.To, err = c.window(); err != nil {
		return o, err
	}
	if text := c.get("rate"); text != "" {
		if _, err := fmt.Sscanf(text, "%g", &o.Rate); err != nil || o.Rate < 0 {
			return o, wrong("rate: %q is not a number of events a second", text)
		}
	}
	return o, nil
}

func planReplay(c *call) (preview, error) {
	o, err := c.replay()
	if err != nil {
		return preview{}, err
	}
	plan, err := c.use.Replays.Plan(c.ctx, o)
	p := preview{
		Count: -1, Nothing: plan.Found == 0, Undo: "What was sent cannot be taken back; a replay under way can be cancelled.",
		Lines: []string{are(plan.Found, "event") + " sent again, each as its next delivery and flagged as redelivered."},
	}
	if plan.LeftOut > 0 {
		p.Lines = append(p.Lines, number(plan.LeftOut)+" are left out: expired, malformed, or for none of the topics.")
	}
	for _, t := range plan.Topics {
		text := things(t.Found, "record")
		if t.Compacted {
			text += "; the topic is compacted, so that an old record replaces the newest one of its key"
		}
		p.Rows = append(p.Rows, row{t.Name, text})
	}
	return p, err
}

func doReplay(c *call) (notice, error) {
	o, err := c.replay()
	if err != nil {
		return notice{}, err
	}
	info, err := c.use.Replays.Start(c.ctx, o)
	return notice{Text: "Replay " + info.ID + " has begun: " + things(info.Found, "event") + ".", Undo: &undo{Action: "replay-cancel", Label: "Cancel it", Fields: []row{{"replay", info.ID}}}}, err
}

func planReplayCancel(c *call) (preview, error) {
	return uncounted("It can be ordered again.", "Replay "+c.get("replay")+" ends: what it has queued is sent, the rest is not."), nil
}

func doReplayCancel(c *call) (notice, error) {
	return notice{Text: "Replay " + c.get("replay") + " is cancelled."}, c.use.Replays.Cancel(c.ctx, c.get("replay"))
}

func planReplayResume(c *call) (preview, error) {
	return uncounted("It can be cancelled.", "This process goes on with replay "+c.get("replay")+" where it broke off."), nil
}

func doReplayResume(c *call) (notice, error) {
	info, err := c.use.Replays.Resume(c.ctx, c.get("replay"))
	return notice{Text: "Replay " + info.ID + " goes on.", Undo: &undo{Action: "replay-cancel", Label: "Cancel it", Fields: []row{{"replay", c.get("replay")}}}}, err
}

func planIndexes(c *call) (preview, error) {
	v, err := c.use.Indexes.Verify(c.ctx, false)
	p := preview{
		Count: int64(len(v.Drift)), Nothing: v.OK(), Undo: "It cannot be taken back, and need not be: these are the indexes that this version declares.",
		Lines: []string{fmt.Sprintf("%s in %s: not as declared. While an index is built, purge and lists of its collection are slow.", things(int64(len(v.Drift)), "difference"), things(int64(v.Collections), "collection"))},
	}
	for _, d := range v.Drift {
		p.Rows = append(p.Rows, row{d.Collection, d.Index})
	}
	return p, err
}

func doIndexes(c *call) (notice, error) {
	v, err := c.use.Indexes.Rebuild(c.ctx)
	text := "The indexes are as declared."
	if !v.OK() {
		text = "Some indexes still differ; outrelay doctor says why."
	}
	return notice{Text: text}, err
}

func (c *call) clear(dry bool) (admin.Cleared, error) {
	return c.use.Operator.Clear(c.ctx, admin.ClearOrder{What: c.q["what"], Collection: c.get("collection"), Confirm: c.get("_phrase"), Force: c.get("force") != "", DryRun: dry})
}

func planClear(c *call) (preview, error) {
	out, err := c.clear(true)
	p := preview{
		Count: out.Found, Nothing: out.Found == 0, Phrase: out.Confirm, Undo: "It cannot be taken back: everything in these collections is gone, delivered or not.",
		Lines: []string{things(out.Found, "document") + " of " + strings.Join(c.q["what"], ", ") + ": removed for good."},
	}
	for _, one := range out.Collections {
		p.Rows = append(p.Rows, row{one.Collection + " (" + one.What + ")", things(one.Found, "document")})
	}
	if err != nil || c.get("force") != "" {
		return p, err
	}
	list, err := c.use.Operator.Slots(c.ctx)
	if kind, _ := admin.Explain(err); err != nil && kind == admin.FailNotFound {
		return p, nil // it never ran, so nobody works for it
	}
	for i := range list {
		if w := &list[i]; w.Owner != "" && w.ExpiresInMS > 0 {
			p.Lines = append(p.Lines, "Node "+w.Node+" works for it on slot "+w.Slot+": pause the watcher first, or go back and tick that it is meant although a relay works.")
			p.Nothing = true
		}
	}
	return p, err
}

func doClear(c *call) (notice, error) {
	out, err := c.clear(false)
	return notice{Text: things(out.Removed, "document") + " removed.", Final: "They are gone."}, err
}

func (c *call) inboxPurge(dry bool) (admin.InboxPurged, error) {
	older, err := c.span("older", 7*24*time.Hour)
	if err != nil {
		return admin.InboxPurged{}, err
	}
	return c.use.Inboxes.Purge(c.ctx, admin.InboxPurge{Database: c.get("database"), Collection: c.get("collection"), OlderThan: older, DryRun: dry})
}

func planInboxPurge(c *call) (preview, error) {
	out, err := c.inboxPurge(true)
	return preview{
		Count: -1, Nothing: out.Matched == 0, Undo: "It cannot be taken back: a message that comes once more after that, and that no watermark covers, is handled once more.",
		Lines: []string{"About " + things(out.Matched, "marker") + " of handled messages: removed from " + c.get("database") + "."},
	}, err
}

func doInboxPurge(c *call) (notice, error) {
	out, err := c.inboxPurge(false)
	return notice{Text: things(out.Removed, "marker") + " removed.", Final: "They are gone."}, err
}

func planInboxRelease(c *call) (preview, error) {
	out, err := c.use.Inboxes.Release(c.ctx, c.get("database"), c.get("collection"), c.get("force") != "", true)
	p := preview{
		Count: -1, Nothing: out.Matched == 0, Undo: "It cannot be taken back; whoever held them finds that out when it finishes.",
		Lines: []string{things(out.Matched, "claimed message") + " can be handled again at once."},
	}
	if force := c.get("force") != ""; out.Live > 0 {
		p.Lines = append(p.Lines, number(out.Live)+" of them are held by somebody right now.")
		if !force {
			p.Lines = append(p.Lines, "If that process is known to be gone, go back and tick that claims are meant that are held now; else wait until their lease is over.")
		}
		p.Nothing = p.Nothing || !force
	}
	return p, err
}

func doInboxRelease(c *call) (notice, error) {
	out, err := c.use.Inboxes.Release(c.ctx, c.get("database"), c.get("collection"), c.get("force") != "", false)
	return notice{Text: things(out.Released, "claim") + " released."}, err
}
