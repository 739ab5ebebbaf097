package opspage

import (
	"crypto/rand"
	"sync"
)

// keepNotices is how many are remembered; one that is gone is only not shown.
const keepNotices = 256

// notice says what was done.
type notice struct {
	Text  string
	Rows  []row
	Undo  *undo
	Final string // why there is no undo, or how else
	who   string
}

// row is a name and what is said of it.
type row struct{ Name, Value string }

// undo is the action that takes it back.
type undo struct {
	Action, Label string
	Fields        []row
}

// notices hands what an action did over to the page that is shown after it: an address must not be able to say something
// that did not happen.
type notices struct {
	mu    sync.Mutex
	byID  map[string]*notice
	order []string
}

func (n *notices) put(x *notice) string {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.byID == nil {
		n.byID = map[string]*notice{}
	}
	id := rand.Text()
	n.byID[id] = x
	if n.order = append(n.order, id); len(n.order) > keepNotices {
		delete(n.byID, n.order[0])
		n.order = n.order[1:]
	}
	return id
}

// take is the notice, for the one who acted.
func (n *notices) take(id, who string) *notice {
	n.mu.Lock()
	defer n.mu.Unlock()
	if x := n.byID[id]; x != nil && x.who == who {
		return x
	}
	return nil
}
