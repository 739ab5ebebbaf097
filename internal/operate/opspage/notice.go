package opspage

import "github.com/outrelay/outrelay/internal/operate/tasks"

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
// of passed in the address, because an address could describe an action that did not happen. An action whose notice is gone
// was done all the same.
type notices struct{ tasks.Shelf[*notice] }

// find returns the notice with this id if the actor is the one who acted, or nil.
func (n *notices) find(id, actor string) *notice {
	if notice, known := n.Get(id); known && notice.actor == actor {
		return notice
	}
	return nil
}
