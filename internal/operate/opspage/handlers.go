package opspage

import (
	"github.com/outrelay/outrelay/internal/operate/admin"
)

// handlers is the data of the page of messages that handlers retry.
type handlers struct {
	admin.Page[admin.HandlerMessage]
	Groups []admin.HandlerWaitingGroup
	Empty  bool // the filter has no condition
}

func (c *call) handlerFilter() admin.HandlerWaitingFilter {
	return admin.HandlerWaitingFilter{
		Database: c.value("database"), Group: c.value("group"), Handler: c.value("handler"),
		Topic: c.value("topic"), Key: c.q.Get("key"), Reason: c.q.Get("reason"),
	}
}

func showHandlers(call *call) (any, error) {
	filter := call.handlerFilter()
	page := handlers{Empty: filter.Empty()}
	var err error
	page.Page, err = call.use.Handlers.List(call.ctx, filter, call.pageLimit(), call.value("after"))
	if err == nil && page.Total > 0 && page.Total <= maxSummarized {
		page.Groups, err = call.use.Handlers.Summary(call.ctx, filter)
	}
	return page, call.ignoreFirstRun(err)
}

func filterHandlers(*call) *filter {
	return &filter{Path: "/waiting/handlers", Label: "Filter messages that handlers retry", Button: "Filter", Fields: []input{
		{Name: "group", Label: "Consumer group"},
		{Name: "handler", Label: "Handler"},
		{Name: "topic", Label: "Topic"},
		{Name: "key", Label: "Key"},
		{Name: "reason", Label: "Reason begins with"},
	}, More: []input{{Name: "database", Label: "Database"}}}
}

// selectMessages returns the filter of the messages that an action applies to.
func (c *call) selectMessages() (admin.HandlerWaitingFilter, error) {
	filter := c.handlerFilter()
	ids, all, err := c.parseScope("message")
	filter.IDs, filter.All = ids, all
	return filter, err
}

// membersAct states who carries an action on messages out.
const membersAct = "The member of the group that has the partition carries it out within about two seconds; without a running member, the messages wait for one."

func planHandlerRetry(call *call) (preview, error) {
	filter, err := call.selectMessages()
	if err != nil {
		return preview{}, err
	}

	out, err := call.use.Handlers.Retry(call.ctx, filter, admin.DryRun)
	preview := preview{
		run: func() (notice, error) {
			out, err := call.use.Handlers.Retry(call.ctx, filter, admin.ForReal)
			return notice{Text: countVerb(out.Retried, "message") + " tried again now.", Final: membersAct}, err
		},
		Count:   out.Retried,
		Nothing: out.Retried == 0,
		Lines:   []string{countVerb(out.Retried, "message") + " tried again at once; their failed attempts still count."},
		Undo:    "It cannot be taken back. " + membersAct,
	}
	if after := out.Matched - out.Retried; after > 0 {
		preview.Lines = append(preview.Lines, countNoun(after, "message")+" not tried on their own: they follow an earlier message of their key.")
	}
	return preview, err
}

func planHandlerDiscard(call *call) (preview, error) {
	filter, err := call.selectMessages()
	if err != nil {
		return preview{}, err
	}

	out, err := call.use.Handlers.Discard(call.ctx, filter, admin.DryRun)
	return preview{
		run: func() (notice, error) {
			out, err := call.use.Handlers.Discard(call.ctx, filter, admin.ForReal)
			return notice{Text: countVerb(out.Discarded, "message") + " discarded.", Final: "They become dead letters of class skipped. " + membersAct}, err
		},
		Count:   out.Matched,
		Nothing: out.Matched == 0,
		Lines:   []string{countVerb(out.Matched, "message") + " discarded without another attempt. Later messages of their keys are tried then."},
		Undo:    "Requeue the dead letters to revert it. " + membersAct,
	}, err
}
