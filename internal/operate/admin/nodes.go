package admin

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/outrelay/outrelay/internal/relay/stored/nodes"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/relay/stored/lease"
)

// Node is a process as the other nodes see it. Ages are measured by the server's clock.
type Node struct {
	Node           string     `json:"node"`
	Address        string     `json:"address,omitempty"`
	Version        string     `json:"version,omitempty"`
	Phase          string     `json:"phase"`    // owner or standby
	Watchers       []string   `json:"watchers"` // watchers that it runs
	Slots          []string   `json:"slots"`    // slots that it owns, as watcher/<i>of<N>
	KafkaReachable bool       `json:"kafka_reachable"`
	LastAck        *time.Time `json:"last_ack,omitempty"` // nil if Kafka never acknowledged a record
	StartedAt      time.Time  `json:"started_at"`
	SeenAt         time.Time  `json:"seen_at"`
	AgeS           float64    `json:"age_s"` // age of the last heartbeat
	Stale          bool       `json:"stale"` // the last heartbeat is older than ten seconds
	Tasks          []string   `json:"tasks"` // producer, relay, cleaner, admin
	Capabilities   []string   `json:"capabilities"`
	// Config is the fingerprint of the settings that all nodes of a watcher must share.
	Config     string     `json:"config,omitempty"`
	StaleSince *time.Time `json:"stale_since,omitempty"`
}

// Nodes are the processes that use the state database.
type Nodes struct{ op Operator }

// List returns all nodes with a heartbeat in the last two weeks, with the slots that they own.
// Nodes with more slots come first.
func (n Nodes) List(ctx context.Context) ([]Node, error) {
	status, err := ReadStatus(ctx, n.op.State)
	if err != nil {
		return nil, err
	}
	list, err := n.read(ctx)
	return newNodes(list, status), err
}

// read returns the nodes as they are stored.
func (n Nodes) read(ctx context.Context) ([]nodes.Node, error) {
	list, err := nodes.NewNodes(n.op.State.Collection("nodes")).List(ctx)
	return append([]nodes.Node{}, list...), err
}

// newNodes returns the nodes with the slots that they own.
func newNodes(list []nodes.Node, status Status) []Node {
	shown := make([]Node, 0, len(list))
	for _, member := range list {
		node := Node{
			Node:           member.Node,
			Address:        member.Address,
			Version:        member.Version,
			Phase:          "standby",
			Watchers:       nonNil(member.Watchers),
			Slots:          []string{},
			KafkaReachable: member.KafkaReachable,
			LastAck:        member.LastAck,
			StartedAt:      member.StartedAt,
			SeenAt:         member.SeenAt,
			AgeS:           member.Age().Seconds(),
			Stale:          !member.Alive(nodes.StaleAfter),
			Tasks:          nonNil(member.Tasks),
			Capabilities:   nonNil(member.Capabilities),
			Config:         member.Facts.Config,
			StaleSince:     member.StaleSince,
		}
		for _, w := range ownedSlots(status, member.Node) {
			node.Slots = append(node.Slots, w.Name+"/"+w.Slot)
			node.Phase = "owner"
		}
		shown = append(shown, node)
	}

	// Owners come first.
	slices.SortStableFunc(shown, func(a, b Node) int { return len(b.Slots) - len(a.Slots) })
	return shown
}

// nonNil returns list, or an empty list for nil, so that JSON does not contain null.
func nonNil(list []string) []string {
	if list == nil {
		return []string{}
	}
	return list
}

// ownedSlots returns the slots whose lease node holds now.
func ownedSlots(status Status, node string) []SlotStatus {
	var slots []SlotStatus
	for _, w := range status.Slots {
		if w.Node == node && w.Owner != "" && w.ExpiresInMS > 0 {
			slots = append(slots, w)
		}
	}
	return slots
}

// Release makes a node release all slots that it owns, and prevents it from acquiring them for
// the duration hold. The node releases them at its next renewal, after draining the records in
// flight. Other nodes take over at once. Release returns the slots.
func (n Nodes) Release(ctx context.Context, node string, hold time.Duration) ([]string, error) {
	if hold < time.Millisecond {
		return nil, invalidRequest("releasing for %s has no effect: use a duration such as 30s", hold)
	}
	owned, err := n.FindSlots(ctx, node)
	if err != nil {
		return nil, err
	}

	released := []string{}
	for _, id := range owned {
		// The watcher document may have been removed since the status was read.
		if err = lease.StepDown(ctx, n.op.watcherDocuments(), id, hold); err != nil && !errors.Is(err, lease.ErrNotFound) {
			break
		}
		err, released = nil, append(released, id)
	}
	if len(released) == 0 {
		return released, err
	}
	return released, n.op.logOutcome(ctx, "node_released", bson.D{
		{Key: "of", Value: node},
		{Key: "slots", Value: released},
		{Key: "hold_ms", Value: hold.Milliseconds()},
	}, err)
}

// FindSlots returns the slots that a node owns, as [Nodes.Release] would release them. It returns [mongodb.ErrNotFound]
// for a node that owns none and is not listed.
func (n Nodes) FindSlots(ctx context.Context, node string) ([]string, error) {
	status, err := ReadStatus(ctx, n.op.State)
	if err != nil {
		return nil, err
	}

	ids := []string{}
	for _, w := range ownedSlots(status, node) {
		ids = append(ids, w.Name+"/"+w.Slot)
	}
	if len(ids) > 0 {
		return ids, nil
	}

	list, err := nodes.NewNodes(n.op.State.Collection("nodes")).List(ctx)
	if err == nil && !slices.ContainsFunc(list, func(listed nodes.Node) bool { return listed.Node == node }) {
		err = unlistedError(node)
	}
	return ids, err
}

func unlistedError(node string) error {
	return fmt.Errorf("node %s: %w; outrelay nodes lists the nodes", node, mongodb.ErrNotFound)
}

// ErrNodeAlive is returned for the removal of a live node, which would add itself again with its
// next heartbeat.
var ErrNodeAlive = errors.New("the node is alive")

// Removable is which nodes may be removed.
type Removable bool

// A node is removed only if it has stopped, or even if it is alive.
const (
	IfStopped   Removable = false
	EvenIfAlive Removable = true
)

// Remove removes a node from the list, and makes it release the slots that it still owns. It returns [ErrNodeAlive] for a live node
// that may not be removed.
func (n Nodes) Remove(ctx context.Context, node string, removable Removable) error {
	if _, err := n.PlanRemoval(ctx, node, removable); err != nil {
		return err
	}

	// Other nodes then take over at once, and not after the leases have expired.
	if _, err := n.Release(ctx, node, briefHold); err != nil {
		return err
	}
	if err := nodes.NewNodes(n.op.State.Collection("nodes")).Leave(ctx, node); err != nil {
		return err
	}
	return n.op.logAction(ctx, "node_removed", bson.D{{Key: "of", Value: node}})
}

// PlanRemoval returns the slots that [Nodes.Remove] would release, or the error with which it would reject the node.
func (n Nodes) PlanRemoval(ctx context.Context, node string, removable Removable) ([]string, error) {
	list, err := n.List(ctx)
	if err != nil {
		return nil, err
	}

	i := slices.IndexFunc(list, func(listed Node) bool { return listed.Node == node })
	if i < 0 {
		return nil, unlistedError(node)
	}
	if !list[i].Stale && removable == IfStopped {
		return nil, fmt.Errorf("%w: the last heartbeat of node %s was %.1f s ago; stop it first", ErrNodeAlive, node, list[i].AgeS)
	}
	return list[i].Slots, nil
}
