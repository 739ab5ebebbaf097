package opspage

import (
	"github.com/outrelay/outrelay/internal/operate/admin"
)

// screens are the pages of the site.
var screens = []screen{
	{path: "/{$}", name: "overview", title: "Overview", area: "overview", live: true, data: showOverview},
	{path: "/pending", name: "pending", title: "Waiting", area: "pending", live: true, data: showPending, filter: filterPending},
	{path: "/topics", name: "topics", title: "Topics", area: "topics", live: true, data: showTopics},
	{path: "/topics/recent", name: "events", title: "Recent events", area: "topics", live: true, data: showRecent, filter: filterRecent},
	{path: "/dead", name: "dead", title: "Dead letters", area: "dead", data: showDead, filter: filterDead},
	{path: "/dead/letter", name: "letter", title: "Dead letter", area: "dead", data: showLetter},
	{path: "/lookup", name: "lookup", title: "Look up", area: "lookup", data: showLookup, filter: filterLookup},
	{path: "/nodes", name: "nodes", title: "Nodes", area: "nodes", live: true, data: showNodes},
	{path: "/nodes/node", name: "node", title: "Node", area: "nodes", live: true, data: showNode},
	{path: "/log", name: "log", title: "Audit log", area: "log", data: showLog, filter: filterLog},
	{path: "/log/entry", name: "entry", title: "Entry of the audit log", area: "log", data: showEntry},
	{path: "/scheduled", name: "scheduled", title: "Scheduled", area: "scheduled", data: showScheduled, filter: filterScheduled},
	{path: "/sagas", name: "sagas", title: "Sagas", area: "sagas", data: showSagas, filter: filterSagas},
	{path: "/inbox", name: "inbox", title: "Inbox", area: "inbox", data: showInbox},
	{path: "/control", name: "control", title: "Control", area: "control", data: showControl},
}

// lookup is the result of a lookup.
type lookup struct {
	Asked bool // the form was submitted
	ByKey bool // the text was looked up as a key
	admin.LookupResult
}

// showLookup looks up a text as an id, as a key, or as a key if no event has it as its id.
func showLookup(c *call) (any, error) {
	text := c.q.Get("q")
	if text == "" {
		return lookup{}, nil
	}

	q := admin.LookupQuery{ID: text, Collection: c.value("collection"), Limit: c.pageLimit()}
	var err error
	if q.From, q.To, err = c.parseWindow(); err != nil {
		return nil, err
	}
	// Users paste a text without knowing whether it is an id or a key.
	by := c.value("by")
	if by != "key" {
		found, err := c.use.Operator.Lookup(c.ctx, q)
		if err != nil || by == "id" || len(found.Envelopes)+len(found.Letters) > 0 {
			return lookup{Asked: true, LookupResult: found}, err
		}
	}

	q.ID, q.Key = "", text
	found, err := c.use.Operator.Lookup(c.ctx, q)
	return lookup{Asked: true, ByKey: true, LookupResult: found}, err
}

// scheduled is the data of the list of scheduled events.
type scheduled struct {
	admin.ScheduledPage
	Groups []admin.ScheduledGroup
	Empty  bool // the filter has no condition
}

func showScheduled(c *call) (any, error) {
	f, err := c.parseScheduledFilter()
	if err != nil {
		return nil, err
	}

	d := scheduled{Empty: f.Empty()}
	if d.ScheduledPage, err = c.use.Schedule.List(c.ctx, f, c.pageLimit(), c.value("after")); err != nil {
		return nil, err
	}
	if d.Total > 0 && d.Total <= maxSummarized {
		d.Groups, err = c.use.Schedule.Summary(c.ctx, f)
	}
	return d, err
}

// sagas is the data of the page of sagas: all types, and the instances of one type or one instance.
type sagas struct {
	Types []admin.SagaType
	Page  *admin.SagaPage
	One   *admin.Saga
	Shown bool // One contains the state
}

func showSagas(c *call) (any, error) {
	var d sagas
	var err error
	if d.Types, err = c.use.Sagas.Types(c.ctx); err != nil {
		return nil, err
	}

	// One form serves three steps: the types, the instances of one, and one instance.
	database, name, id := c.value("database"), c.value("saga"), c.q.Get("id")
	switch {
	case database == "" || name == "":
		return d, nil

	case id != "":
		d.Shown = c.isSet("payload") && c.who.Payloads
		one, err := c.use.Sagas.Show(c.ctx, database, name, id, d.Shown)
		d.One = &one
		return d, err
	}
	page, err := c.use.Sagas.List(c.ctx, database, name, c.pageLimit(), c.value("after"))
	d.Page = &page
	return d, err
}

// inbox is the data of the page of inboxes.
type inbox struct {
	Inboxes []admin.InboxCounts
	Marks   []admin.InboxMark // of the selected inbox
}

func showInbox(c *call) (any, error) {
	var d inbox
	var err error
	if d.Inboxes, err = c.use.Inboxes.List(c.ctx); err != nil {
		return nil, err
	}
	if c.isSet("database") {
		d.Marks, err = c.use.Inboxes.Marks(c.ctx, c.value("database"), c.value("collection"))
	}
	return d, err
}
