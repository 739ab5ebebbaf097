package opspage

import (
	"slices"
	"time"

	"github.com/outrelay/outrelay/internal/operate/admin"
)

func showLog(c *call) (any, error) {
	f := admin.AuditFilter{
		Watcher: c.value("of"), Node: c.value("node"), Actor: c.value("actor"), Kinds: splitWords(c.value("kind")),
	}
	var err error
	if f.From, f.To, err = c.parseWindow(); err != nil {
		return nil, err
	}
	return c.use.Operator.Audit(c.ctx, f, c.pageLimit(), c.value("after"))
}

// around is the time before and after an entry of the log for which the page links to other entries.
const around = 5 * time.Minute

// entry is one entry of the audit log.
type entry struct {
	ID       string
	Found    *admin.AuditEntry // nil if the log does not contain it any more
	From, To string            // the time range around it
}

func showEntry(c *call) (any, error) {
	d := entry{ID: c.value("id")}
	if d.ID == "" {
		return nil, invalidInput("the id of the entry is missing")
	}
	found, err := c.use.Operator.Audit(c.ctx, admin.AuditFilter{ID: d.ID}, 1, "")
	if err != nil || len(found.Entries) == 0 {
		return d, err
	}

	d.Found = &found.Entries[0]
	d.From, d.To = formatISO(d.Found.At.Add(-around)), formatISO(d.Found.At.Add(around))
	return d, nil
}

// node is one node with its latest entries of the audit log.
type node struct {
	Name    string
	Found   *admin.Node // nil if the list does not contain it
	Entries []admin.AuditEntry
}

// entriesOfNode is the number of entries on the page of a node.
const entriesOfNode = 20

func showNode(c *call) (any, error) {
	d := node{Name: c.value("node")}
	if d.Name == "" {
		return nil, errNoNode
	}
	list, err := c.use.Nodes.List(c.ctx)
	if err != nil {
		return nil, err
	}
	if i := slices.IndexFunc(list, func(n admin.Node) bool { return n.Node == d.Name }); i >= 0 {
		d.Found = &list[i]
	}

	page, err := c.use.Operator.Audit(c.ctx, admin.AuditFilter{Node: d.Name}, entriesOfNode, "")
	d.Entries = page.Entries
	return d, err
}
