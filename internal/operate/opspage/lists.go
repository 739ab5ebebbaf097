package opspage

import (
	"github.com/outrelay/outrelay/internal/operate/admin"
)

// screens are the pages of the site.
var screens = []screen{
	{path: "/{$}", name: "overview", title: "Overview", area: "overview", live: true, data: showOverview},
	{path: "/waiting", name: "waiting", title: "Waiting", area: "waiting", live: true, data: showWaiting, filter: filterWaiting},
	{path: "/waiting/handlers", name: "handlers", title: "Waiting", area: "waiting", live: true, data: showHandlers, filter: filterHandlers},
	{path: "/topics", name: "topics", title: "Topics", area: "topics", live: true, data: showTopics},
	{path: "/topics/recent", name: "events", title: "Recent events", area: "topics", live: true, data: showRecent, filter: filterRecent},
	{path: "/dead", name: "dead", title: "Dead letters", area: "dead", data: showDead, filter: filterDead},
	{path: "/dead/letter", name: "letter", title: "Dead letter", area: "dead", data: showLetter, saysInForm: true},
	{path: "/lookup", name: "lookup", title: "Look up", area: "lookup", data: showLookup, filter: filterLookup},
	{path: "/nodes", name: "nodes", title: "Nodes", area: "nodes", live: true, data: showNodes},
	{path: "/nodes/node", name: "node", title: "Node", area: "nodes", live: true, data: showNode},
	{path: "/log", name: "log", title: "Audit log", area: "log", data: showLog, filter: filterLog},
	{path: "/log/entry", name: "entry", title: "Entry of the audit log", area: "log", data: showEntry},
	{path: "/scheduled", name: "scheduled", title: "Scheduled", area: "scheduled", data: showScheduled, filter: filterScheduled},
	{path: "/groups", name: "groups", title: "Consumer groups", area: "groups", data: showGroups},
	{path: "/sagas", name: "sagas", title: "Sagas", area: "sagas", data: showSagas, filter: filterSagas},
	{path: "/inbox", name: "inbox", title: "Inbox", area: "inbox", data: showInbox},
	{path: "/task", name: "task", title: "Action", live: true, data: showTask},
	{path: "/control", name: "control", title: "Control", area: "control", live: true, data: showControl},
}

// lookup is the result of a lookup.
type lookup struct {
	Asked bool // the form was submitted
	admin.LookupResult
	Conversation *admin.Conversation // instead of a lookup
}

// showLookup shows a conversation, or looks up a text as an id, as a key, or as a key if no event has it as its id.
func showLookup(call *call) (any, error) {
	if id := call.q.Get("conversation"); id != "" {
		found, err := call.use.Operator.Conversation(call.ctx, admin.ConversationQuery{ID: id, Collection: call.value("collection")})
		return lookup{Conversation: &found}, call.ignoreFirstRun(err)
	}
	text := call.q.Get("q")
	if text == "" {
		return lookup{}, nil
	}

	query := admin.LookupQuery{Collection: call.value("collection"), Limit: call.pageLimit()}
	var err error
	if query.From, query.To, err = call.parseWindow(); err != nil {
		return nil, err
	}
	switch call.value("by") {
	case "id":
		query.ID = text
	case "key":
		query.Key = text
	default:
		query.Text = text
	}
	found, err := call.use.Operator.Lookup(call.ctx, query)
	return lookup{Asked: true, LookupResult: found}, call.ignoreFirstRun(err)
}

// scheduled is the data of the list of scheduled events.
type scheduled struct {
	admin.Page[admin.Scheduled]
	Groups []admin.ScheduledGroup
	Empty  bool // the filter has no condition
}

func showScheduled(call *call) (any, error) {
	filter, err := call.parseScheduledFilter()
	if err != nil {
		return nil, err
	}

	page := scheduled{Empty: filter.Empty()}
	page.Page, err = call.use.Schedule.List(call.ctx, filter, call.pageLimit(), call.value("after"))
	if err = call.ignoreFirstRun(err); err != nil {
		return nil, err
	}
	if page.Total > 0 && page.Total <= maxSummarized {
		page.Groups, err = call.use.Schedule.Summary(call.ctx, filter)
	}
	return page, err
}

// sagas is the data of the page of sagas: all types, and the instances of one type or one instance.
type sagas struct {
	Types []admin.SagaType
	Page  *admin.Page[admin.Saga]
	One   *admin.Saga
	Shown bool // One contains the state
}

func showSagas(call *call) (any, error) {
	var data sagas
	var err error
	if data.Types, err = call.use.Sagas.Types(call.ctx); err != nil {
		return nil, err
	}

	// One form serves three steps: the types, the instances of one, and one instance.
	database, name, id := call.value("database"), call.value("saga"), call.q.Get("id")
	switch {
	case database == "" || name == "":
		return data, nil

	case id != "":
		data.Shown = call.isSet("payload") && call.who.Payloads
		one, err := call.use.Sagas.Show(call.ctx, database, name, id, data.Shown)
		data.One = &one
		return data, err
	}
	page, err := call.use.Sagas.List(call.ctx, database, name, call.pageLimit(), call.value("after"))
	data.Page = &page
	return data, err
}

// inbox is the data of the page of inboxes.
type inbox struct {
	Inboxes []admin.InboxCounts
	Marks   []admin.InboxMark // of the selected inbox
}

func showInbox(call *call) (any, error) {
	var page inbox
	var err error
	if page.Inboxes, err = call.use.Inboxes.List(call.ctx); err != nil {
		return nil, err
	}
	if call.isSet("database") {
		page.Marks, err = call.use.Inboxes.Marks(call.ctx, call.value("database"), call.value("collection"))
	}
	return page, err
}
