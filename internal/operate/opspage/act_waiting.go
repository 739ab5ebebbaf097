package opspage

import (
	"fmt"
	"time"

	"github.com/outrelay/outrelay/internal/operate/admin"
)

// selectFailed returns the filter of the envelopes that an action on failed envelopes applies to.
func (c *call) selectFailed() (admin.WaitingFilter, error) {
	filter := c.waitingFilter()
	ids, all, err := c.parseScope("event")
	if !all {
		filter = admin.WaitingFilter{Collection: filter.Collection, IDs: ids}
	}
	filter.All = all
	return filter, err
}

func planRetry(attempts admin.Attempts) func(*call) (preview, error) {
	return func(call *call) (preview, error) {
		filter, err := call.selectFailed()
		if err != nil {
			return preview{}, err
		}
		out, err := call.use.Waiting.Retry(call.ctx, filter, attempts, admin.DryRun)
		text := " due now; their failed attempts still count."
		if attempts == admin.ResetAttempts {
			text = " tried again at once, and as often as new ones."
		}
		preview := preview{
			run: func() (notice, error) {
				out, err := call.use.Waiting.Retry(call.ctx, filter, attempts, admin.ForReal)
				return notice{Text: countVerb(out.Done, "event") + " tried again now."}, err
			},
			Count:   out.Failed,
			Nothing: out.Failed == 0,
			Lines:   []string{countVerb(out.Failed, "failed event") + text},
			Undo:    "It cannot be taken back.",
		}

		// Between the list and the action, an envelope may have been sent.
		if left := int64(len(filter.IDs)) - out.Failed; left > 0 {
			preview.Lines = append(preview.Lines, formatNumber(left)+" of the selected events wait for another reason and are left alone.")
		}
		return preview, err
	}
}

func planCancel(call *call) (preview, error) {
	filter, err := call.selectScheduled()
	if err != nil {
		return preview{}, err
	}

	page, err := call.use.Schedule.List(call.ctx, filter, 1, "")
	preview := preview{
		run: func() (notice, error) {
			out, err := call.use.Schedule.Cancel(call.ctx, filter, call.did)
			return notice{
				Text:  countNoun(out.Cancelled, "scheduled event") + " cancelled.",
				Rows:  listNotScheduled(out.NotScheduled),
				Final: "They are gone. The service that scheduled them can append them again.",
			}, err
		},
		Count:   page.Total,
		Nothing: page.Total == 0,
		Lines:   []string{countVerb(page.Total, "scheduled event") + " cancelled. Events that are being sent by then are not cancelled."},
		Undo:    "It cannot be taken back: the events are never sent, unless a service appends them again.",
	}
	if filter.Empty() {
		preview.Lines = append(preview.Lines, "No filter is set: this includes every scheduled event.")
	}
	if page.Total > 1 {
		preview.Phrase = fmt.Sprintf("cancel %d", page.Total)
	}
	return preview, err
}

// listNotScheduled lists the selected events that an action did not change.
func listNotScheduled(ids []string) (rows []row) {
	for _, id := range ids {
		rows = append(rows, row{admin.ShowRow(id), "not scheduled any more: cancelled, or being sent"})
	}
	return rows
}

// parseReschedule returns the selected events and their new due time.
func (c *call) parseReschedule() (admin.ScheduledFilter, time.Time, error) {
	filter, err := c.selectScheduled()
	if err != nil {
		return filter, time.Time{}, err
	}
	to, err := c.parseTime("due")
	if err == nil && to.IsZero() {
		err = invalidInput("due: the new due time is missing")
	}
	return filter, to, err
}

func planReschedule(call *call) (preview, error) {
	filter, to, err := call.parseReschedule()
	if err != nil {
		return preview{}, err
	}

	page, err := call.use.Schedule.List(call.ctx, filter, 1, "")
	preview := preview{
		run: func() (notice, error) {
			out, err := call.use.Schedule.Move(call.ctx, filter, to, call.did)
			text := countVerb(out.Moved, "event") + " due at " + formatTime(to) + "."
			return notice{Text: text, Rows: listNotScheduled(out.NotScheduled)}, err
		},
		Count:   page.Total,
		Nothing: page.Total == 0,
		Lines:   []string{countVerb(page.Total, "event") + " due at " + formatTime(to) + "."},
		Undo:    "The events can be rescheduled again until a watcher claims them.",
	}

	// An envelope may have been sent since the list was shown.
	if left := int64(len(filter.IDs)) - page.Total; left > 0 {
		preview.Lines = append(preview.Lines, formatNumber(left)+" of the selected events are not scheduled any more and are left alone.")
	}
	if filter.Empty() {
		preview.Lines = append(preview.Lines, "No filter is set: this includes every scheduled event.")
	}
	return preview, err
}
