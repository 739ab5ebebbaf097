package opspage

import (
	"github.com/outrelay/outrelay/internal/admin"
)

// screens are the pages, in the order of their addresses' weight for an operator.
var screens = []screen{
	{path: "/{$}", name: "overview", title: "Overview", area: "overview", live: true, data: showOverview},
	{path: "/pending", name: "pending", title: "Pending", area: "pending", live: true, data: showPending},
	{path: "/dead", name: "dead", title: "Dead letters", area: "dead", data: showDead},
	{path: "/dead/letter", name: "letter", title: "Dead letter", area: "dead", data: showLetter},
	{path: "/lookup", name: "lookup", title: "Look up", area: "lookup", data: showLookup},
	{path: "/nodes", name: "nodes", title: "Nodes", area: "nodes", live: true, data: showNodes},
	{path: "/log", name: "log", title: "Events log", area: "log", data: showLog},
	{path: "/scheduled", name: "scheduled", title: "Scheduled", area: "scheduled", data: showScheduled},
	{path: "/sagas", name: "sagas", title: "Sagas", area: "sagas", data: showSagas},
	{path: "/inbox", name: "inbox", title: "Inbox", area: "inbox", data: showInbox},
	{path: "/control", name: "control", title: "Control", area: "control", data: showControl},
}

// lookup is what was found of an event, or of a key.
type lookup struct {
	Asked bool
	admin.LookupResult
}

func showLookup(c *call) (any, error) {
	q := admin.LookupQuery{Collection: c.get("collection"), Limit: c.limit()}
	text := c.q.Get("q")
	if text == "" {
		return lookup{}, nil
	}
	if c.get("by") == "key" {
		q.Key = text
	} else {
		q.ID = c.get("q")
	}
	var err error
	if q.From, q.To, err = c.window(); err != nil {
		return nil, err
	}
	found, err := c.use.Operator.Lookup(c.ctx, q)
	return lookup{true, found}, err
}

type scheduled struct {
	admin.ScheduledPage
	Groups []admin.ScheduledGroup
	Empty  bool
}

func showScheduled(c *call) (any, error) {
	f, err := c.scheduledFilter()
	if err != nil {
		return nil, err
	}
	d := scheduled{Empty: f.Empty()}
	if d.ScheduledPage, err = c.use.Schedule.List(c.ctx, f, c.limit(), c.get("after")); err != nil {
		return nil, err
	}
	if d.Total > 0 && d.Total <= summaryUpTo {
		d.Groups, err = c.use.Schedule.Summary(c.ctx, f)
	}
	return d, err
}

type sagas struct {
	Types []admin.SagaType
	Page  *admin.SagaPage
	One   *admin.Saga
	Shown bool
}

func showSagas(c *call) (any, error) {
	var d sagas
	var err error
	if d.Types, err = c.use.Sagas.Types(c.ctx); err != nil {
		return nil, err
	}
	database, name, id := c.get("database"), c.get("saga"), c.q.Get("id")
	switch {
	case database == "" || name == "":
	case id != "":
		d.Shown = c.get("payload") != "" && c.who.Payloads
		one, err := c.use.Sagas.Show(c.ctx, database, name, id, d.Shown)
		if err != nil {
			return nil, err
		}
		d.One = &one
	default:
		page, err := c.use.Sagas.List(c.ctx, database, name, c.limit(), c.get("after"))
		if err != nil {
			return nil, err
		}
		d.Page = &page
	}
	return d, nil
}

type inbox struct {
	Inboxes []admin.InboxCounts
	Marks   []admin.InboxMark
}

func showInbox(c *call) (any, error) {
	var d inbox
	var err error
	if d.Inboxes, err = c.use.Inboxes.List(c.ctx); err != nil {
		return nil, err
	}
	if c.get("database") != "" {
		d.Marks, err = c.use.Inboxes.Marks(c.ctx, c.get("database"), c.get("collection"))
	}
	return d, err
}
