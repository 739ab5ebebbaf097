package httpapi

import (
	"context"
	"time"

	"github.com/outrelay/outrelay/internal/admin"
)

// done is the answer to an action that has nothing to count.
type done struct {
	Done bool   `json:"done"`
	What string `json:"what" doc:"What was done, in a sentence."`
}

// Empty is a request without a body.
type Empty struct{ Scope }

// NamedWatcher is a request about the watcher of the path.
type NamedWatcher struct {
	Name string `path:"watcher" pattern:"^[A-Za-z0-9._-]{1,100}$" doc:"The watcher."`
}

func (n NamedWatcher) watcher() string { return n.Name }

// Slotted is a request on the lease: of all slots of a watcher, or of one (N28).
type Slotted struct {
	Slot string `query:"slot" pattern:"^[0-9]{1,2}of[0-9]{1,2}$" doc:"Only this slot of the watcher, such as 0of2; by default all of them."`
}

func (s Slotted) slot() string { return s.Slot }

// Leased is a request on the lease of the watcher of the path.
type Leased struct {
	NamedWatcher
	Slotted
}

// collections are the outboxes of a watcher.
type collections struct {
	Collections []string `json:"collections"`
}

func (a *api) watchers() {
	look(a, "/overview", "overview", "What an operator sees first: watchers, nodes, counts, what waits, checks", func(ctx context.Context, op admin.Operator, _ *Empty) (admin.Overview, error) {
		return op.Overview(ctx)
	})
	look(a, "/watchers", "list-watchers", "Every slot of every watcher of the state database", func(ctx context.Context, op admin.Operator, _ *Empty) (admin.Status, error) {
		return admin.ReadStatus(ctx, op.State)
	})
	look(a, "/collections", "list-collections", "The outboxes that the watcher reads", func(ctx context.Context, op admin.Operator, _ *Empty) (collections, error) {
		list, err := op.Collections(ctx, "")
		return collections{list}, err
	})
	act(a, "/watchers/{watcher}/pause", "pause", "Stop the watcher, or one slot of it, whoever runs it, until resume", func(ctx context.Context, op admin.Operator, _ *Leased) (done, error) {
		return done{true, "paused; the owner drains and releases at its next renewal"}, op.Pause(ctx)
	})
	act(a, "/watchers/{watcher}/resume", "resume", "End a pause", func(ctx context.Context, op admin.Operator, _ *Leased) (done, error) {
		return done{true, "resumed"}, op.Resume(ctx)
	})
	act(a, "/watchers/{watcher}/pin", "pin", "Hand the watcher to a node and keep it there while that lives; an empty node ends it", func(ctx context.Context, op admin.Operator, in *struct {
		Leased
		Body struct {
			Node string `json:"node" maxLength:"100" pattern:"^[A-Za-z0-9._-]*$"`
		}
	},
	) (done, error) {
		if in.Body.Node == "" {
			return done{true, "not pinned any more"}, op.Pin(ctx, "")
		}
		return done{true, "pinned to " + in.Body.Node}, op.Pin(ctx, in.Body.Node)
	})
	act(a, "/watchers/{watcher}/step-down", "step-down", "Make the owner release and keep away for a while; of several slots, the owner of each", func(ctx context.Context, op admin.Operator, in *struct {
		Leased
		Body struct {
			HoldS float64 `json:"hold_s,omitempty" minimum:"0.001" maximum:"86400" default:"10" doc:"Seconds for which the owner keeps away."`
		}
	},
	) (done, error) {
		return done{true, "the owner steps down"}, op.StepDown(ctx, seconds(in.Body.HoldS))
	})
}

func seconds(s float64) time.Duration { return time.Duration(s * float64(time.Second)) }

// nodeList is the answer of the list of nodes.
type nodeList struct {
	Nodes []admin.Node `json:"nodes"`
}

// released are the slots that a node was told to give up.
type released struct {
	Slots []string `json:"slots"`
}

// trimmed is how many entries of the log went.
type trimmed struct {
	Removed int64 `json:"removed"`
}

// NodeAction is about one node.
type NodeAction struct {
	Node string `json:"node" minLength:"1" maxLength:"100"`
}

func (a *api) nodes() {
	look(a, "/nodes", "list-nodes", "Every process that was heard of within two weeks, with the slots that it owns", func(ctx context.Context, op admin.Operator, _ *Empty) (nodeList, error) {
		list, err := op.Nodes(ctx)
		return nodeList{list}, err
	})
	act(a, "/nodes/release", "release-node", "Make a node give up every slot that it owns", func(ctx context.Context, op admin.Operator, in *struct {
		Scope
		Body struct {
			NodeAction
			HoldS float64 `json:"hold_s,omitempty" minimum:"0.001" maximum:"86400" default:"10"`
		}
	},
	) (released, error) {
		slots, err := op.NodeRelease(ctx, in.Body.Node, seconds(in.Body.HoldS))
		return released{slots}, err
	})
	act(a, "/nodes/remove", "remove-node", "Take a node that is gone off the list, with what it still owns", func(ctx context.Context, op admin.Operator, in *struct {
		Scope
		Body struct {
			NodeAction
			Force bool `json:"force,omitempty" doc:"Also one that gives signs of life."`
		}
	},
	) (done, error) {
		return done{true, "the node is off the list"}, op.NodeRemove(ctx, in.Body.Node, in.Body.Force)
	})
	look(a, "/events", "list-events", "The log of what happened and who did what, the newest first", func(ctx context.Context, op admin.Operator, in *struct {
		Scope
		Paging
		Kinds []string  `query:"kind" maxItems:"100" doc:"Only these kinds, separated by commas."`
		Node  string    `query:"node" maxLength:"200"`
		Actor string    `query:"actor" maxLength:"200"`
		From  time.Time `query:"from"`
		To    time.Time `query:"to"`
	},
	) (admin.EventPage, error) {
		return op.Events(ctx, admin.EventFilter{Watcher: in.Watcher, Node: in.Node, Actor: in.Actor, Kinds: in.Kinds, From: in.From, To: in.To}, in.Limit, in.After)
	})
	act(a, "/events/trim", "trim-events", "Keep only the newest entries of the log", func(ctx context.Context, op admin.Operator, in *struct {
		Scope
		Body struct {
			Keep int `json:"keep" doc:"Entries to keep; 0 or less keeps all."`
		}
	},
	) (trimmed, error) {
		n, err := op.EventsTrim(ctx, in.Body.Keep)
		return trimmed{n}, err
	})
}
