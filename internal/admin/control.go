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

	"github.com/outrelay/outrelay/internal/lease"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/nodes"
	"github.com/outrelay/outrelay/internal/outboxes"
	"github.com/outrelay/outrelay/internal/slot"
	"github.com/outrelay/outrelay/internal/slots"
)

// watcherIDs returns the ids of the watcher documents that an action applies to. For a watcher that
// never ran, it returns the id of one document that does not exist.
func (o Operator) watcherIDs(ctx context.Context) ([]string, error) {
	if o.Slot != "" {
		p, err := slot.Parse(o.Slot)
		if err != nil {
			return nil, invalidRequest("%v", err)
		}
		return []string{p.ID(o.Watcher)}, nil
	}

	ids, err := slots.NewDivisions(o.State).IDs(ctx, o.Watcher)
	if err == nil && len(ids) == 0 {
		ids = []string{slot.Range{}.ID(o.Watcher)}
	}
	return ids, err
}

// expectedIDs returns the ids of the documents that the watcher has or should have, or only that of
// o.Slot. It rejects a slot that belongs to another number of slots: its document would divide the
// watcher in two ways.
func (o Operator) expectedIDs(ctx context.Context) ([]string, error) {
	divisions := slots.NewDivisions(o.State)
	division, err := divisions.Read(ctx, o.Watcher)

	// Older versions did not store the division. The ids of the documents contain the number of
	// slots.
	if errors.Is(err, mongodb.ErrNotFound) {
		var existing []string
		existing, err = divisions.IDs(ctx, o.Watcher)
		if err == nil && len(existing) > 0 {
			_, p, _ := slot.ParseID(existing[0])
			division.Of = p.N
		}
	}
	if err != nil {
		return nil, err
	}

	var ids []string
	for _, p := range slot.Ranges(division.Of) {
		ids = append(ids, p.ID(o.Watcher))
	}
	if o.Slot == "" {
		return ids, nil
	}

	named, err := o.watcherIDs(ctx)
	if err == nil && division.Of > 0 && !slices.Contains(ids, named[0]) {
		err = invalidRequest("watcher %s has %d slots, and %s is not one of them", o.Watcher, division.Of, o.Slot)
	}
	return named, err
}

// forEachSlot calls do for each document of the action, and logs the action if at least one call
// succeeded. After an error it continues with the next document. It returns all errors.
func (o Operator) forEachSlot(ctx context.Context, kind nodes.Kind, fields bson.D, do func(id string) error) error {
	ids, err := o.watcherIDs(ctx)
	if err != nil {
		return err
	}

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
	return errors.Join(append(errs, o.logAction(ctx, kind, fields))...)
}

// Slots returns the slots that an action on the lease applies to, as their owners last reported
// them.
func (o Operator) Slots(ctx context.Context) ([]Watcher, error) {
	ids, err := o.watcherIDs(ctx)
	if err != nil {
		return nil, err
	}
	s, err := ReadStatus(ctx, o.State)
	if err != nil {
		return nil, err
	}

	slots := slices.DeleteFunc(s.Watchers, func(w Watcher) bool { return !slices.Contains(ids, w.Name+"/"+w.Slot) })
	if len(slots) == 0 {
		return nil, fmt.Errorf("%s: %w", ids[0], lease.ErrNotFound)
	}
	return slots, nil
}

// Pause stops the watcher on all nodes until Resume is called. The owner drains and releases the
// lease at its next renewal.
func (o Operator) Pause(ctx context.Context) error {
	return o.forEachSlot(ctx, nodes.Paused, nil, func(id string) error {
		return lease.Pause(ctx, o.watcherDocuments(), id)
	})
}

// Resume ends a pause.
func (o Operator) Resume(ctx context.Context) error {
	return o.forEachSlot(ctx, nodes.Resumed, nil, func(id string) error {
		return lease.Resume(ctx, o.watcherDocuments(), id)
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
func (o Operator) Pin(ctx context.Context, node string) error { return pinTo(ctx, o, node, false) }

// PinAhead is Pin for a node that may not have run yet. Until its first start, another node runs the watcher.
func (o Operator) PinAhead(ctx context.Context, node string) error { return pinTo(ctx, o, node, true) }

func pinTo(ctx context.Context, o Operator, node string, ahead bool) error {
	if err := checkPin(ctx, o, node, ahead); err != nil {
		return err
	}
	return o.forEachSlot(ctx, "pinned", bson.D{{Key: "to", Value: node}}, func(id string) error {
		return lease.Pin(ctx, o.watcherDocuments(), id, node)
	})
}

// checkPin returns [ErrOtherNode] if node is alive and runs only other watchers. All other
// nodes would wait for it. Unless ahead is set, it returns [ErrUnknownNode] if node is not listed.
func checkPin(ctx context.Context, o Operator, node string, ahead bool) error {
	if node == "" {
		return nil
	}

	list, err := nodes.NewNodes(o.State.Collection("nodes")).List(ctx)
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
		if n.Alive(nodes.StaleAfter) && !slices.Contains(n.Watchers, o.Watcher) {
			return fmt.Errorf("node %s runs %q but not watcher %s, so no node would send its events: %w",
				node, n.Watchers, o.Watcher, ErrOtherNode)
		}
		return nil
	}
	if ahead {
		return nil
	}
	return fmt.Errorf("node %s: %w; the nodes are %s; to pin a node before its first start, use force",
		node, ErrUnknownNode, cmp.Or(strings.Join(known, ", "), "none"))
}

// StepDown makes the owner release the lease, and prevents it from acquiring the lease for the
// duration hold, which must be positive.
func (o Operator) StepDown(ctx context.Context, hold time.Duration) error {
	if hold < time.Millisecond {
		return invalidRequest("stepping down for %s has no effect: use a duration such as 30s", hold)
	}
	fields := bson.D{{Key: "hold_ms", Value: hold.Milliseconds()}}
	return o.forEachSlot(ctx, nodes.SteppedDown, fields, func(id string) error {
		return lease.StepDown(ctx, o.watcherDocuments(), id, hold)
	})
}

// Adopt accepts state that was copied from another replica set as the state of this one (N5).
func (o Operator) Adopt(ctx context.Context) error {
	replicaSet, err := lease.ReplicaSetID(ctx, o.State.Client())
	if err != nil {
		return err
	}
	return o.forEachSlot(ctx, "adopted", bson.D{{Key: "replica_set", Value: replicaSet}}, func(id string) error {
		return lease.Adopt(ctx, o.watcherDocuments(), id, replicaSet)
	})
}

// Release removes the watcher's registration for a collection, so that another watcher may read it
// (N25). It reports whether the watcher was registered.
func (o Operator) Release(ctx context.Context, ns string) (bool, error) {
	claims, err := o.registrations(ctx)
	if err != nil {
		return false, err
	}

	for _, c := range claims {
		if c.NS != ns {
			continue
		}
		registry := outboxes.NewRegistry(o.State.Collection("collections"))
		if err := registry.Release(ctx, [16]byte(c.UUID.Data), o.Watcher); err != nil {
			return false, err
		}
		return true, o.logAction(ctx, "collection_released", bson.D{{Key: "collection", Value: ns}})
	}
	return false, nil
}

// briefHold is how long an owner that must acquire its lease again may not do so.
const briefHold = time.Second

// Recover orders a sweep. The next owner sends every envelope of the watched collections that its
// position in the stream does not cover, marked as redelivered, and then continues with the stream.
// Recover serves a watcher whose document vanished, which is created again, and a watcher that
// halted after lost history or a dropped collection.
//
// The sweep begins with the envelopes written at from, which must not be in the future. The zero
// time sweeps all envelopes. Envelopes that the watcher has not sent yet are swept in any case. An
// order that arrives during a sweep is executed too.
func (o Operator) Recover(ctx context.Context, from time.Time) error {
	since, err := o.sweepTimestamp(ctx, from)
	if err != nil {
		return err
	}
	ids, err := o.expectedIDs(ctx)
	if err != nil {
		return err
	}

	// If this fails for one of several slots, the operator may repeat it: an order that exists
	// stays as it is.
	for _, id := range ids {
		if err := lease.RequestSweep(ctx, o.watcherDocuments(), id, since, briefHold); err != nil {
			return err
		}
	}
	return o.logAction(ctx, "recover_ordered", bson.D{{Key: "from", Value: from}})
}

// sweepTimestamp returns the cluster time of a sweep from the time from. It rejects a time in the
// future: the sweep would skip envelopes that are not sent, or the caller used the wrong time zone.
func (o Operator) sweepTimestamp(ctx context.Context, from time.Time) (bson.Timestamp, error) {
	if from.IsZero() {
		return bson.Timestamp{}, nil
	}

	now, err := mongodb.ServerTime(ctx, o.State.Client())
	if err != nil {
		return bson.Timestamp{}, err
	}
	if from.After(now) {
		return bson.Timestamp{}, invalidRequest("cannot sweep from %s, which is in the future: "+
			"the server time is %s; check the time zone",
			from.UTC().Format(time.RFC3339), now.UTC().Format(time.RFC3339))
	}
	if from.Unix() <= 0 {
		return bson.Timestamp{}, invalidRequest("%s is before 1970; leave the time out to sweep everything",
			from.UTC().Format(time.RFC3339))
	}
	return bson.Timestamp{T: uint32(from.Unix())}, nil
}
