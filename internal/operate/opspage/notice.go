package opspage

import (
	"crypto/rand"
	"sync"
)

// maxNotices bounds the stored notices. An action whose notice is gone was done all the same.
const maxNotices = 256

// notice describes a finished action.
type notice struct {
	Text  string
	Rows  []row
	Undo  *undo
	Final string // why the action cannot be undone, or how else
	actor string
}

// row is a name with its description.
type row struct{ Name, Value string }

// undo is the action that reverts another one.
type undo struct {
	Action, Label string
	Fields        []row
}

// notices stores the notice of an action for the page that is shown next. A notice is stored instead
// of passed in the address, because an address could describe an action that did not happen.
type notices struct {
	mu    sync.Mutex
	byID  map[string]*notice
	order []string
}

// store returns the id of the notice.
func (n *notices) store(stored *notice) string {
	n.mu.Lock()
	defer n.mu.Unlock()

	if n.byID == nil {
		n.byID = map[string]*notice{}
	}
	id := rand.Text()
	n.byID[id] = stored
	n.order = append(n.order, id)
	if len(n.order) > maxNotices {
		delete(n.byID, n.order[0])
		n.order = n.order[1:]
	}
	return id
}

// find returns the notice with this id if the actor is the one who acted, or nil.
func (n *notices) find(id, actor string) *notice {
	n.mu.Lock()
	defer n.mu.Unlock()

	if notice := n.byID[id]; notice != nil && notice.actor == actor {
		return notice
	}
	return nil
}
