package admin

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/contract/slot"
	"github.com/outrelay/outrelay/internal/relay/stored/divisions"
	"github.com/outrelay/outrelay/internal/relay/stored/lease"
	"github.com/outrelay/outrelay/internal/relay/stored/nodes"
)

// Lease is the right to send of a watcher's owners, for all slots of the watcher or for one of them.
type Lease struct{ op Operator }

// watcherIDs returns the ids of the watcher documents that an action applies to. For a watcher that
// never ran, it returns the id of one document that does not exist.
func (l Lease) watcherIDs(ctx context.Context) ([]string, error) {
	if l.op.Slot != "" {
		slotRange, err := slot.Parse(l.op.Slot)
		if err != nil {
			return nil, invalidRequest("%v", err)
		}
		return []string{slotRange.ID(l.op.Watcher)}, nil
	}

	ids, err := divisions.New(l.op.State).IDs(ctx, l.op.Watcher)
	if err == nil && len(ids) == 0 {
		ids = []string{slot.Range{}.ID(l.op.Watcher)}
	}
	return ids, err
}

// forEachSlot calls changeDocuments for the documents of the action.
func (l Lease) forEachSlot(ctx context.Context, kind nodes.Kind, fields bson.D, do func(id string) error) error {
	ids, err := l.watcherIDs(ctx)
	if err != nil {
		return err
	}
	return changeDocuments(ctx, l.op, ids, kind, fields, do)
}

// changeDocuments calls do for each of the documents, and logs the action if at least one call
// succeeded. After an error it continues with the next document. It returns all errors.
func changeDocuments(ctx context.Context, operator Operator, ids []string, kind nodes.Kind, fields bson.D, do func(id string) error) error {
	var errs []error
	for _, id := range ids {
		if err := do(id); err != nil {
			errs = append(errs, err)
		}
	}
	// Nothing was done, so there is nothing to log.
	if len(errs) == len(ids) {
		return errors.Join(errs...)
	}
	return errors.Join(append(errs, operator.logAction(ctx, kind, fields))...)
}

// Slots returns the slots that an action on the lease applies to, as their owners last reported
// them.
func (l Lease) Slots(ctx context.Context) ([]SlotStatus, error) {
	ids, err := l.watcherIDs(ctx)
	if err != nil {
		return nil, err
	}
	status, err := ReadStatus(ctx, l.op.State)
	if err != nil {
		return nil, err
	}

	slots := slices.DeleteFunc(status.Slots, func(slot SlotStatus) bool { return !slices.Contains(ids, slot.Name+"/"+slot.Slot) })
	if len(slots) == 0 {
		return nil, fmt.Errorf("%s: %w", ids[0], lease.ErrNotFound)
	}
	return slots, nil
}

// Pause stops the watcher on all nodes until Resume is called. The owner drains and releases the
// lease at its next renewal.
func (l Lease) Pause(ctx context.Context) error {
	return l.forEachSlot(ctx, nodes.Paused, nil, func(id string) error {
		return lease.Pause(ctx, l.op.watcherDocuments(), id, l.op.Actor)
	})
}

// Resume ends a pause.
func (l Lease) Resume(ctx context.Context) error {
	return l.forEachSlot(ctx, nodes.Resumed, nil, func(id string) error {
		return lease.Resume(ctx, l.op.watcherDocuments(), id)
	})
}

// ErrOtherNode is returned for a pin that would stop the watcher, because the node is alive and
// does not run the watcher.
var ErrOtherNode = errors.New("the node does not run the watcher")

// ErrUnknownNode is returned for a pin to a node that has never run.
var ErrUnknownNode = errors.New("no such node has run")

// Pin moves the watcher to node and keeps it there while that node is alive. An empty node ends the
// pin. Pin returns [ErrUnknownNode] for a node without a heartbeat in the last two weeks: if the watcher
// has no owner, the other nodes wait for the pinned node before one of them takes over.
func (l Lease) Pin(ctx context.Context, node string) error {
	if err := checkPin(ctx, l.op, node); err != nil {
		return err
	}
	return l.pinTo(ctx, node)
}

// PinAhead is Pin for a node that may not have run yet. Until its first start, another node runs the watcher.
func (l Lease) PinAhead(ctx context.Context, node string) error {
	if err := checkPin(ctx, l.op, node); err != nil && !errors.Is(err, ErrUnknownNode) {
		return err
	}
	return l.pinTo(ctx, node)
}

func (l Lease) pinTo(ctx context.Context, node string) error {
	return l.forEachSlot(ctx, "pinned", bson.D{{Key: "to", Value: node}}, func(id string) error {
		return lease.Pin(ctx, l.op.watcherDocuments(), id, node)
	})
}

// checkPin returns [ErrOtherNode] if node is alive and runs only other watchers. All other
// nodes would wait for it. It returns [ErrUnknownNode] if node is not listed.
func checkPin(ctx context.Context, operator Operator, node string) error {
	if node == "" {
		return nil
	}

	list, err := nodes.NewNodes(operator.State.Collection("nodes")).List(ctx)
	if err != nil {
		return err
	}
	known := make([]string, 0, len(list))
	for i := range list {
		n := &list[i]
		if n.Node != node {
			known = append(known, n.Node)
			continue
		}
		// A stopped node may be configured for this watcher at its next start.
		if n.Alive(nodes.StaleAfter) && !slices.Contains(n.Watchers, operator.Watcher) {
			return fmt.Errorf("%w %s: node %s runs only %s, and no other node would send the events; outrelay nodes lists the nodes of "+
				"each watcher", ErrOtherNode, operator.Watcher, node, cmp.Or(strings.Join(n.Watchers, ", "), "other commands"))
		}
		return nil
	}
	slices.Sort(known)
	return fmt.Errorf("node %s: %w; the nodes are %s", node, ErrUnknownNode, cmp.Or(strings.Join(known, ", "), "none"))
}

// StepDownOrder makes owners release their slots.
type StepDownOrder struct {
	Hold  time.Duration // how long the owner does not acquire the lease again; must be positive
	Force bool          // also if no other node can take over
}

// ErrNoStandby is returned for a step-down that would stop the delivery, because no other live node can take over.
var ErrNoStandby = errors.New("no other live node can take over")

// StepDown makes the owner release the lease, and prevents it from acquiring the lease for some time. Without order.Force, it returns
// [ErrNoStandby] if nothing would be sent in that time.
func (l Lease) StepDown(ctx context.Context, order StepDownOrder) error {
	if order.Hold < time.Millisecond {
		return invalidRequest("stepping down for %s has no effect: use a duration such as 30s", order.Hold)
	}
	if !order.Force {
		if err := l.CheckStandby(ctx, order.Hold); err != nil {
			return err
		}
	}

	fields := bson.D{{Key: "hold_ms", Value: order.Hold.Milliseconds()}, {Key: "force", Value: order.Force}}
	return l.forEachSlot(ctx, nodes.SteppedDown, fields, func(id string) error {
		return lease.StepDown(ctx, l.op.watcherDocuments(), id, order.Hold)
	})
}

// CheckStandby returns [ErrNoStandby] with the slots for which no other live node can take over while their owners stay away for the
// duration hold.
func (l Lease) CheckStandby(ctx context.Context, hold time.Duration) error {
	slots, err := l.Slots(ctx)
	if err != nil {
		return err
	}
	list, err := nodes.NewNodes(l.op.State.Collection("nodes")).List(ctx)
	if err != nil {
		return err
	}

	live := slices.DeleteFunc(list, func(node nodes.Node) bool {
		return !node.Alive(nodes.StaleAfter) || !slices.Contains(node.Watchers, l.op.Watcher)
	})
	var without []string
	for i := range slots {
		if slot := &slots[i]; !slices.ContainsFunc(live, func(node nodes.Node) bool { return canTakeOver(node.Node, slot, live) }) {
			without = append(without, slot.Name+"/"+slot.Slot)
		}
	}
	if len(without) == 0 {
		return nil
	}
	return fmt.Errorf("%w %s, so nothing of it is sent for %s; start a second node first, or restart the owner instead",
		ErrNoStandby, strings.Join(without, ", "), hold)
}

// canTakeOver reports whether a live node may acquire the slot while its owner stays away. A pin to a live node keeps all others away.
func canTakeOver(node string, slot *SlotStatus, live []nodes.Node) bool {
	pinned := slices.ContainsFunc(live, func(other nodes.Node) bool { return other.Node == slot.Pin })
	return node != slot.Node && (!pinned || node == slot.Pin)
}
