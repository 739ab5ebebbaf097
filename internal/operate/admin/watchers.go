package admin

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/relay/stored/nodes"
	"github.com/outrelay/outrelay/internal/relay/stored/waiting"
)

// KnownWatcher is a watcher of the state database.
type KnownWatcher struct {
	Name        string   `json:"name"`
	Slots       []string `json:"slots"`
	Owned       []string `json:"owned"`       // the slots that a node owns now
	Nodes       []string `json:"nodes"`       // live nodes that run it
	Collections []string `json:"collections"` // outboxes that are registered for it
}

// Watchers are the watchers of the state database.
type Watchers struct{ op Operator }

// List returns the watchers that have run with the state database, sorted by name.
func (x Watchers) List(ctx context.Context) ([]KnownWatcher, error) {
	operator := x.op
	status, err := ReadStatus(ctx, operator.State)
	if err != nil {
		return nil, err
	}
	running, err := nodes.NewNodes(operator.State.Collection("nodes")).List(ctx)
	if err != nil {
		return nil, err
	}

	list := []KnownWatcher{}
	for _, w := range status.Slots {
		i := slices.IndexFunc(list, func(watcher KnownWatcher) bool { return watcher.Name == w.Name })
		if i < 0 {
			i = len(list)
			list = append(list, KnownWatcher{Name: w.Name, Slots: []string{}, Owned: []string{}, Nodes: []string{}})
		}
		list[i].Slots = append(list[i].Slots, w.Slot)
		// An expired lease has no owner.
		if w.Owner != "" && w.ExpiresInMS > 0 {
			list[i].Owned = append(list[i].Owned, w.Slot)
		}
	}

	for i := range list {
		watcher := &list[i]
		for _, n := range running {
			if n.Alive(nodes.StaleAfter) && slices.Contains(n.Watchers, watcher.Name) {
				watcher.Nodes = append(watcher.Nodes, n.Node)
			}
		}
		if watcher.Collections, err = operator.ForWatcher(watcher.Name).collectionNames(ctx); err != nil {
			return nil, err
		}
	}
	slices.SortFunc(list, func(a, b KnownWatcher) int { return strings.Compare(a.Name, b.Name) })
	return list, nil
}

// RemovedWatcher counts the documents of a removed watcher, or with DryRun those that would be removed.
type RemovedWatcher struct {
	DryRun        bool     `json:"dry_run"`
	Watcher       string   `json:"watcher"`
	Collections   []string `json:"collections"`   // outboxes that another watcher may read afterwards
	Documents     int64    `json:"documents"`     // in the state database
	Registrations int64    `json:"registrations"` // of outboxes, part of Documents
}

// Remove removes the position, the registrations and the history of the operator's watcher from the state
// database. It keeps outboxes, dead letters and the audit log. It returns [ErrInUse] while a live node
// runs the watcher or a slot is owned, [ErrUnsent] while events of the watcher wait, and [mongodb.ErrNotFound] if there is no
// such watcher.
func (x Watchers) Remove(ctx context.Context, dryRun bool) (RemovedWatcher, error) {
	operator := x.op
	out := RemovedWatcher{DryRun: dryRun, Watcher: operator.Watcher}
	known, err := x.List(ctx)
	if err != nil {
		return out, err
	}
	i := slices.IndexFunc(known, func(watcher KnownWatcher) bool { return watcher.Name == operator.Watcher })
	if i < 0 {
		return out, fmt.Errorf("watcher %s in %s: %w; outrelay watchers lists the watchers", operator.Watcher, operator.State.Name(), mongodb.ErrNotFound)
	}
	watcher := known[i]
	out.Collections = watcher.Collections
	// Its position is the only protection of events that are not delivered yet.
	switch {
	case len(watcher.Nodes) > 0:
		return out, fmt.Errorf("%w: node %s runs watcher %s; stop it first", ErrInUse, watcher.Nodes[0], operator.Watcher)
	case len(watcher.Owned) > 0:
		return out, fmt.Errorf("%w: slot %s of watcher %s has an owner; wait until its lease has expired", ErrInUse, watcher.Owned[0], operator.Watcher)
	}
	if err := x.checkSent(ctx); err != nil {
		return out, err
	}

	if !dryRun {
		// Logged before the first removal. Otherwise a removal that crashes would leave no entry.
		if err := operator.logAction(ctx, "watcher_removing", bson.D{{Key: "collections", Value: watcher.Collections}}); err != nil {
			return out, fmt.Errorf("nothing was removed: %w", err)
		}
	}
	err = x.removeDocuments(ctx, &out)
	if dryRun {
		return out, err
	}
	return out, operator.logOutcome(ctx, "watcher_removed", bson.D{{Key: "documents", Value: out.Documents}}, err)
}

// ErrUnsent is returned for the removal of a watcher that has events to send.
var ErrUnsent = errors.New("its events are not sent")

// checkSent returns [ErrUnsent] if an event waits, or a scheduled one is claimed: only a process of this watcher sends them.
func (x Watchers) checkSent(ctx context.Context) error {
	operator := x.op
	waits, err := waiting.CountMatching(ctx, operator.waiting(), waiting.Query{Watcher: operator.Watcher})
	if err != nil {
		return err
	}
	claimed, err := waiting.CountClaimed(ctx, operator.State.Collection(waiting.ClaimsName), operator.Watcher)
	if err != nil || waits+claimed == 0 {
		return err
	}
	return fmt.Errorf("%w: %d events of watcher %s wait, and %d scheduled ones are claimed; start a process of this watcher until all are sent",
		ErrUnsent, waits, operator.Watcher, claimed)
}

// removeDocuments removes the documents of the watcher, or counts them in a dry run. A lease that was acquired in
// the meantime stays.
func (x Watchers) removeDocuments(ctx context.Context, out *RemovedWatcher) error {
	operator := x.op
	// The server's clock decides whether a lease is free, in the same statement that removes it.
	free := bson.E{Key: "$expr", Value: bson.D{{Key: "$lte", Value: bson.A{"$expiresAt", "$$NOW"}}}}

	for _, part := range []struct {
		collection string
		filter     bson.D
	}{
		{"watchers", append(mongodb.OfSlots(operator.Watcher), free)},
		{"slots", bson.D{{Key: "_id", Value: operator.Watcher}}},
		{"collections", bson.D{{Key: "watcher", Value: operator.Watcher}}},
		{"history", mongodb.OfSlots(operator.Watcher)},
		{"figures", bson.D{{Key: "_id", Value: operator.Watcher}}},
	} {
		coll := mongodb.Majority(operator.State.Collection(part.collection))
		found, err := coll.CountDocuments(ctx, part.filter)
		if err == nil && !out.DryRun && found > 0 {
			found, err = removeAll(ctx, coll, part.filter)
		}
		if err != nil {
			return mongodb.DescribeError(err, "removing watcher "+operator.Watcher, "find and remove", operator.State.Namespace(part.collection))
		}
		out.Documents += found
		if part.collection == "collections" {
			out.Registrations = found
		}
	}
	return nil
}
