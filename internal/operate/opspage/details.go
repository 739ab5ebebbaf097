package opspage

import (
	"slices"
	"time"

	"github.com/outrelay/outrelay/internal/operate/admin"
)

func showLog(call *call) (any, error) {
	filter := admin.AuditFilter{
		Watcher: call.value("of"), Node: call.value("node"), Actor: call.value("actor"), Kinds: splitWords(call.value("kind")),
	}
	var err error
	if filter.From, filter.To, err = call.parseWindow(); err != nil {
		return nil, err
	}
	return call.use.Operator.Audit(call.ctx, filter, call.pageLimit(), call.value("after"))
}

// around is the time before and after an entry of the log for which the page links to other entries.
const around = 5 * time.Minute

// entry is one entry of the audit log.
type entry struct {
	ID       string
	Found    *admin.AuditEntry // nil if the log does not contain it any more
	From, To string            // the time range around it
}

func showEntry(call *call) (any, error) {
	page := entry{ID: call.value("id")}
	if page.ID == "" {
		return nil, invalidInput("the id of the entry is missing")
	}
	found, err := call.use.Operator.Audit(call.ctx, admin.AuditFilter{ID: page.ID}, 1, "")
	if err != nil || len(found.Items) == 0 {
		return page, err
	}

	page.Found = &found.Items[0]
	page.From, page.To = formatISO(page.Found.At.Add(-around)), formatISO(page.Found.At.Add(around))
	return page, nil
}

// node is one node with its latest entries of the audit log.
type node struct {
	Name    string
	Found   *admin.Node // nil if the list does not contain it
	Entries []admin.AuditEntry
}

// entriesOfNode is the number of entries on the page of a node.
const entriesOfNode = 20

func showNode(call *call) (any, error) {
	data := node{Name: call.value("node")}
	if data.Name == "" {
		return nil, errNoNode
	}
	list, err := call.use.Nodes.List(call.ctx)
	if err != nil {
		return nil, err
	}
	if i := slices.IndexFunc(list, func(n admin.Node) bool { return n.Node == data.Name }); i >= 0 {
		data.Found = &list[i]
	}

	page, err := call.use.Operator.Audit(call.ctx, admin.AuditFilter{Node: data.Name}, entriesOfNode, "")
	data.Entries = page.Items
	return data, err
}
