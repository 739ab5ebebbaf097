package admin

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/lease"
	"github.com/outrelay/outrelay/internal/store"
)

// nodeStale is the silence after which a node is shown as stale: five signs of life missed.
const nodeStale = 10 * time.Second

// Node is a process as the others see it. Ages are by the server's clock.
type Node struct {
	Node           string     `json:"node"`
	Address        string     `json:"address,omitempty"`
	Version        string     `json:"version,omitempty"`
	Role           string     `json:"role"`     // owner or standby
	Watchers       []string   `json:"watchers"` // that it works for
	Slots          []string   `json:"slots"`    // that it owns, as watcher/<i>of<N>
	KafkaReachable bool       `json:"kafka_reachable"`
	LastAck        *time.Time `json:"last_ack,omitempty"` // nil: it never had one
	StartedAt      time.Time  `json:"started_at"`
	SeenAt         time.Time  `json:"seen_at"`
	AgeS           float64    `json:"age_s"` // of its last sign of life
	Stale          bool       `json:"stale"` // it gave none for longer than ten seconds
	Roles          []string   `json:"roles"` // producer, relay, cleaner, admin
	Capabilities   []string   `json:"capabilities"`
	Schema         int        `json:"schema"`           // number of the last migration that it knows
	Config         string     `json:"config,omitempty"` // fingerprint of what must be the same on all nodes of a watcher
	StaleSince     *time.Time `json:"stale_since,omitempty"`
}

// Nodes are all that were heard of within two weeks, joined with the slots that they own, those that own some first.
func (k Desk) Nodes(ctx context.Context) ([]Node, error) {
	status, err := ReadStatus(ctx, k.State)
	if err != nil {
		return nil, err
	}
	return k.nodes(ctx, status)
}

func (k Desk) nodes(ctx context.Context, status Status) ([]Node, error) {
	list, err := store.NewNodes(k.State.Collection("nodes")).List(ctx)
	if err != nil {
		return nil, err
	}
	out := make([]Node, 0, len(list))
	for _, n := range list {
		one := Node{
			Node: n.Node, Address: n.Address, Version: n.Version, Role: "standby", Watchers: texts(n.Watchers), Slots: []string{},
			Roles: texts(n.Roles), Capabilities: texts(n.Capabilities), Schema: n.Schema, Config: n.Facts.Config, StaleSince: n.StaleSince,
			KafkaReachable: n.KafkaReachable, LastAck: n.LastAck, StartedAt: n.StartedAt, SeenAt: n.SeenAt, AgeS: n.Age().Seconds(), Stale: !n.Alive(nodeStale),
		}
		for _, w := range owned(status, n.Node) {
			one.Slots = append(one.Slots, w.Name+"/"+w.Slot)
			one.Role = "owner"
		}
		out = append(out, one)
	}
	slices.SortStableFunc(out, func(a, b Node) int { return len(b.Slots) - len(a.Slots) })
	return out, nil
}

// texts is a list that is never null in JSON.
func texts(list []string) []string {
	if list == nil {
		return []string{}
	}
	return list
}

// owned are the slots whose lease node holds now.
func owned(s Status, node string) []Watcher {
	var out []Watcher
	for _, w := range s.Watchers {
		if w.Node == node && w.Owner != "" && w.ExpiresInMS > 0 {
			out = append(out, w)
		}
	}
	return out
}

// NodeRelease makes a node give up every slot that it owns, and keeps it from them for hold: at its next renewal at the
// latest, after draining what is in flight. Others take over at once. It returns the slots.
func (k Desk) NodeRelease(ctx context.Context, node string, hold time.Duration) ([]string, error) {
	if hold < time.Millisecond {
		return nil, invalid("a node that keeps away for %s would not release anything; give a time such as 30s", hold)
	}
	status, err := ReadStatus(ctx, k.State)
	if err != nil {
		return nil, err
	}
	out := []string{}
	for _, w := range owned(status, node) {
		id := w.Name + "/" + w.Slot
		if err := lease.StepDown(ctx, k.watchers(), id, hold); err != nil && !errors.Is(err, lease.ErrNotFound) {
			return out, err
		}
		out = append(out, id)
	}
	if len(out) == 0 {
		return out, nil
	}
	return out, k.note(ctx, "node_released", bson.D{{Key: "of", Value: node}, {Key: "slots", Value: out}, {Key: "hold_ms", Value: hold.Milliseconds()}})
}

// ErrNodeAlive refuses to take a node off the list that would be on it again in a moment.
var ErrNodeAlive = errors.New("the node lives")

// NodeRemove takes a node that is gone off the list and has it give up what it still owns. One that gives signs of life is
// an [ErrNodeAlive] unless force is set.
func (k Desk) NodeRemove(ctx context.Context, node string, force bool) error {
	list, err := k.Nodes(ctx)
	if err != nil {
		return err
	}
	i := slices.IndexFunc(list, func(n Node) bool { return n.Node == node })
	switch {
	case i < 0:
		return fmt.Errorf("node %s: %w", node, store.ErrNotFound)
	case !list[i].Stale && !force:
		return fmt.Errorf("%w: node %s gave a sign of life %.1f s ago; stop it first", ErrNodeAlive, node, list[i].AgeS)
	}
	if _, err := k.NodeRelease(ctx, node, bounce); err != nil {
		return err
	}
	if err := store.NewNodes(k.State.Collection("nodes")).Leave(ctx, node); err != nil {
		return err
	}
	return k.note(ctx, "node_removed", bson.D{{Key: "of", Value: node}})
}
