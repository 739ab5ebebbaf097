package httpapi

import (
	"context"
	"time"

	"github.com/outrelay/outrelay/internal/operate/admin"
)

// done is the response to an action without a count.
type done struct {
	Done bool   `json:"done"`
	What string `json:"what" doc:"The performed action, as a sentence."`
}

// Empty is a request without a body.
type Empty struct{ Scope }

// NamedWatcher is a request about the watcher in the path.
type NamedWatcher struct {
	Name string `path:"watcher" pattern:"^[A-Za-z0-9._-]{1,100}$" doc:"The watcher."`
}

func (n NamedWatcher) watcher() string { return n.Name }

// Slotted is a request on the lease, for all slots of a watcher or for one (N28).
type Slotted struct {
	Slot string `query:"slot" pattern:"^[0-9]{1,2}of[0-9]{1,2}$" doc:"Only this slot of the watcher, such as 0of2. Default: all slots."`
}

func (s Slotted) slot() string { return s.Slot }

// Leased is a request on the lease of the watcher in the path.
type Leased struct {
	NamedWatcher
	Slotted
}

func (a *api) addWatchers() {
	addQuery(a, "/overview", "overview", "Show watchers, nodes, counts, waiting envelopes and problems",
		func(ctx context.Context, op admin.Operator, _ *Empty) (admin.Overview, error) {
			return op.Overview(ctx)
		})

	addQuery(a, "/watchers", "list-watchers", "List every slot of every watcher of the state database",
		func(ctx context.Context, op admin.Operator, _ *Empty) (admin.Status, error) {
			return admin.ReadStatus(ctx, op.State)
		})

	addList(a, "/collections", "list-collections", "List the outboxes that the watcher reads", "collections",
		func(ctx context.Context, op admin.Operator, _ *Empty) ([]string, error) {
			return op.Collections(ctx, "")
		})

	addAction(a, "/watchers/{watcher}/pause", "pause", "Stop the watcher, or one slot of it, on all nodes until resume",
		func(ctx context.Context, op admin.Operator, _ *Leased) (done, error) {
			return done{true, "paused; the state is pausing until the owner has drained and released the lease"}, op.Lease().Pause(ctx)
		})

	addAction(a, "/watchers/{watcher}/resume", "resume", "End a pause",
		func(ctx context.Context, op admin.Operator, _ *Leased) (done, error) {
			return done{true, "resumed"}, op.Lease().Resume(ctx)
		})

	addAction(a, "/watchers/{watcher}/pin", "pin", "Move the watcher to a node and keep it there while the node is alive; an empty node ends the pin",
		func(ctx context.Context, op admin.Operator, input *struct {
			Leased
			Body struct {
				Node  string `json:"node" maxLength:"100" pattern:"^[A-Za-z0-9._-]*$"`
				Force bool   `json:"force,omitempty" doc:"Also a node that has never run, before its first start."`
			}
		},
		) (done, error) {
			text := "pinned to " + input.Body.Node
			if input.Body.Node == "" {
				text = "the pin is ended"
			}
			if input.Body.Force {
				return done{true, text}, op.Lease().PinAhead(ctx, input.Body.Node)
			}
			return done{true, text}, op.Lease().Pin(ctx, input.Body.Node)
		})

	addAction(a, "/watchers/{watcher}/step-down", "step-down", "Make the owner of each slot release it and not acquire it again for some time",
		func(ctx context.Context, op admin.Operator, input *struct {
			Leased
			Body struct {
				HoldS float64 `json:"hold_s,omitempty" minimum:"0.001" maximum:"86400" default:"10" doc:"Seconds for which the owner does not acquire it again."`
				Force bool    `json:"force,omitempty" doc:"Also if no other node can take over, so that nothing is sent for that time."`
			}
		},
		) (done, error) {
			return done{true, "the owner steps down"}, op.Lease().StepDown(ctx, admin.StepDownOrder{
				Hold: toDuration(input.Body.HoldS), Force: input.Body.Force,
			})
		})
}

func toDuration(seconds float64) time.Duration { return time.Duration(seconds * float64(time.Second)) }

// released are the slots that a node must release.
type released struct {
	Slots []string `json:"slots"`
}

// trimmed is the number of removed entries of the audit log.
type trimmed struct {
	Removed int64 `json:"removed"`
}

// NodeAction names a node.
type NodeAction struct {
	Node string `json:"node" minLength:"1" maxLength:"100"`
}

func (a *api) addNodes() {
	addList(a, "/nodes", "list-nodes", "List all nodes with a heartbeat in the last two weeks, with the slots that they own", "nodes",
		func(ctx context.Context, op admin.Operator, _ *Empty) ([]admin.Node, error) {
			return op.Nodes().List(ctx)
		})

	addAction(a, "/nodes/release", "release-node", "Make a node release all slots that it owns",
		func(ctx context.Context, op admin.Operator, input *struct {
			Scope
			Body struct {
				NodeAction
				HoldS float64 `json:"hold_s,omitempty" minimum:"0.001" maximum:"86400" default:"10"`
			}
		},
		) (released, error) {
			slots, err := op.Nodes().Release(ctx, input.Body.Node, toDuration(input.Body.HoldS))
			return released{slots}, err
		})

	addAction(a, "/nodes/remove", "remove-node", "Remove a stopped node from the list, and release its slots",
		func(ctx context.Context, op admin.Operator, input *struct {
			Scope
			Body struct {
				NodeAction
				Force bool `json:"force,omitempty" doc:"Also a live node."`
			}
		},
		) (done, error) {
			return done{true, "the node is removed from the list"}, op.Nodes().Remove(ctx, input.Body.Node, admin.Removable(input.Body.Force))
		})

	addQuery(a, "/audit", "list-audit-entries", "List the audit log: takeovers, gaps and actions of operators, newest first",
		func(ctx context.Context, op admin.Operator, input *struct {
			Scope
			Paging
			admin.AuditFilter
		},
		) (admin.Page[admin.AuditEntry], error) {
			// Every operation has a parameter for the watcher, so the filter has none.
			filter := input.AuditFilter
			filter.Watcher = input.Scope.Watcher
			return op.Audit(ctx, filter, input.Limit, input.After)
		})

	addAction(a, "/audit/trim", "trim-audit", "Remove all entries of the audit log except the newest",
		func(ctx context.Context, op admin.Operator, input *struct {
			Scope
			Body struct {
				Keep int `json:"keep" doc:"Number of entries to keep; 0 or less keeps all."`
			}
		},
		) (trimmed, error) {
			n, err := op.TrimAudit(ctx, input.Body.Keep)
			return trimmed{n}, err
		})
}
