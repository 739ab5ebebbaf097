package app

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/lease"
	"github.com/outrelay/outrelay/internal/nodes"
	"github.com/outrelay/outrelay/internal/slot"
	"github.com/outrelay/outrelay/internal/store"
)

const (
	// askSoon is how long an attempt at a slot waits that other nodes have room for; meanwhile the table is read anew.
	askSoon = 50 * time.Millisecond
	// keepLeast and keepMost bound how long a node keeps what it took beyond its quota because nobody else did, so that slots do not
	// go round: longer each time.
	keepLeast = staleAfter
	keepMost  = 5 * time.Minute
)

// balance shares the slots among the nodes that live, without a leader: each node reads the same documents, computes the same
// quotas, attempts no slot beyond its own, and hands over one at a time of what it has too many. A slot is handed over as
// at any stop: its lease is released and acquired, and nothing is lost, repeated or out of order.
//
// A node counts as living while it gives signs of life, reaches Kafka if any node does, and has let no lease expire. A slot
// that stays free, because the node that has room for it does not take it, is anybody's.
type balance struct {
	r        *Relay
	every    time.Duration
	patience time.Duration // with a slot that is free
	poke     chan struct{} // 1 slot

	mu      sync.Mutex
	table   slot.Table // as it was read last; no nodes before
	held    map[int]bool
	trying  map[int]bool
	giving  map[int]bool      // held, and being handed over
	free    map[int]time.Time // since when a slot was seen free
	rescued time.Time
	keep    time.Duration // since rescued
}

func newBalance(r *Relay) *balance {
	return &balance{
		r: r, every: r.cfg.Lease.Renew, patience: max(3*r.cfg.Lease.Renew, time.Second), poke: make(chan struct{}, 1),
		held: map[int]bool{}, trying: map[int]bool{}, giving: map[int]bool{}, free: map[int]time.Time{},
	}
}

// run keeps the table until work ends. When stop does the node leaves the others' tables at once.
func (b *balance) run(stop, work context.Context) error {
	tick := time.NewTicker(b.every)
	defer tick.Stop()
	stopping := stop.Done()
	for {
		if err := b.read(work); err != nil && work.Err() == nil {
			b.r.state.set("slots", "the slots cannot be shared: "+err.Error(), false)
		} else {
			b.r.state.clear("slots")
		}
		if stop.Err() == nil {
			b.handOver(time.Now())
		}
		select {
		case <-work.Done():
			return nil
		case <-stopping:
			stopping = nil
			b.r.leave(work) // at once, so that its slots are shared out
		case <-tick.C:
		case <-b.poke:
			pause := time.NewTimer(askSoon)
			select {
			case <-pause.C:
			case <-work.Done():
			}
			pause.Stop()
		}
	}
}

// read reads who lives and who has what.
func (b *balance) read(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, beatEvery)
	defer cancel()
	listed, err := b.r.nodes.List(ctx)
	if err != nil {
		return err
	}
	docs, err := b.documents(ctx)
	if err != nil {
		return err
	}
	t := slot.Table{Slots: make([]slot.Holding, b.r.cfg.Slots)}
	lapsed := map[string]bool{}
	for i := range t.Slots {
		d, there := docs[slot.Part{I: i, N: b.r.cfg.Slots}.ID(b.r.cfg.Watcher)]
		if !there {
			continue
		}
		t.Slots[i] = slot.Holding{Pin: d.Control.Pin, Paused: d.Control.Paused}
		switch {
		case d.Owner == "":
		case d.Live:
			t.Slots[i].Node = d.Node
		case !d.Control.Paused:
			lapsed[d.Node] = true
		}
	}
	t.Nodes = b.living(listed, lapsed)
	b.note(t, time.Now())
	for node := range lapsed {
		// It is noted for all, so that they reckon with it neither now nor when its slots are another's; if it lives, its next
		// sign says otherwise.
		if node != b.r.cfg.Node {
			if err := b.r.nodes.Lapsed(ctx, node); err != nil {
				return err
			}
		}
	}
	return nil
}

// living are the nodes to share with.
func (b *balance) living(list []store.Node, lapsed map[string]bool) []string {
	cfg := b.r.cfg
	list = slices.DeleteFunc(list, func(n store.Node) bool {
		return n.Node != cfg.Node && (!n.Alive(staleAfter) || n.Lapsed || lapsed[n.Node] || n.Slots != cfg.Slots || !slices.Contains(n.Watchers, cfg.Watcher) ||
			len(n.Roles) > 0 && !slices.Contains(n.Roles, string(nodes.Relay)))
	})
	reaches := slices.ContainsFunc(list, func(n store.Node) bool { return n.KafkaReachable })
	out := []string{cfg.Node}
	for _, n := range list {
		if n.Node != cfg.Node && (n.KafkaReachable || !reaches) {
			out = append(out, n.Node)
		}
	}
	return out
}

// owned is what sharing goes by of a watcher document.
type slotDocument struct {
	ID      string        `bson:"_id"`
	Owner   string        `bson:"owner"`
	Node    string        `bson:"node"`
	Live    bool          `bson:"live"` // the lease has not expired
	Control lease.Control `bson:"control"`
}

func (b *balance) documents(ctx context.Context) (map[string]slotDocument, error) {
	coll := b.r.mongo.state.Database(b.r.cfg.MongoDB.State).Collection("watchers")
	ids := bson.A{}
	for _, p := range slot.Parts(b.r.cfg.Slots) {
		ids = append(ids, p.ID(b.r.cfg.Watcher))
	}
	cur, err := coll.Aggregate(ctx, mongo.Pipeline{
		{{Key: "$match", Value: bson.D{{Key: "_id", Value: bson.D{{Key: "$in", Value: ids}}}}}},
		{{Key: "$project", Value: bson.D{
			{Key: "owner", Value: 1},
			{Key: "node", Value: 1},
			{Key: "control", Value: 1},
			{Key: "live", Value: bson.D{{Key: "$gt", Value: bson.A{"$expiresAt", "$$NOW"}}}},
		}}},
	})
	if err != nil {
		return nil, fmt.Errorf("reading the watcher documents: %w", err)
	}
	var list []slotDocument
	if err := cur.All(ctx, &list); err != nil {
		return nil, fmt.Errorf("reading the watcher documents: %w", err)
	}
	docs := make(map[string]slotDocument, len(list))
	for _, d := range list {
		docs[d.ID] = d
	}
	return docs, nil
}

func (b *balance) note(t slot.Table, now time.Time) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.table = t
	for i, s := range t.Slots {
		if s.Node != "" || !t.Loose(i) {
			delete(b.free, i)
		} else if b.free[i].IsZero() {
			b.free[i] = now
		}
	}
}

// yieldReason is why a slot is handed over.
const yieldReason = "another node has fewer slots"

// handOver gives back one slot of those that are too many. How many there are it counts itself: what it has just handed over the
// table may show as its own for a while.
func (b *balance) handOver(now time.Time) {
	b.mu.Lock()
	defer b.mu.Unlock()
	self := b.r.cfg.Node
	if len(b.table.Nodes) == 0 || now.Sub(b.rescued) < b.keep {
		return
	}
	mine := 0
	for i := range b.table.Slots {
		if b.table.Loose(i) && b.held[i] && !b.giving[i] {
			mine++
		}
	}
	if mine <= b.table.Quota(self) {
		return
	}
	for i := len(b.table.Slots) - 1; i >= 0; i-- {
		s := b.r.slots[i]
		if b.table.Slots[i].Node != self || !b.table.Loose(i) || !b.held[i] || b.giving[i] || s.state.is(RoleHalted) {
			continue
		}
		select {
		case s.yield <- yieldReason:
			b.giving[i] = true
		default: // an earlier one was not heard yet
		}
		return
	}
}

// admit is lease.Config's: may this node attempt the slot?
func (b *balance) admit(i int, pinned bool) (time.Duration, func(bool)) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if len(b.table.Nodes) == 0 {
		b.ask()
		return askSoon, nil
	}
	mine := 0
	for j := range b.table.Slots {
		if b.table.Loose(j) && (b.held[j] || b.trying[j]) {
			mine++
		}
	}
	since, free := b.free[i]
	rescue := free && time.Since(since) > b.patience
	beyond := mine >= b.table.Quota(b.r.cfg.Node)
	if beyond && !pinned && !rescue {
		b.ask()
		return askSoon, nil
	}
	b.trying[i] = true
	return 0, func(won bool) {
		b.mu.Lock()
		defer b.mu.Unlock()
		delete(b.trying, i)
		delete(b.free, i)
		if b.held[i] = won; won && beyond && !pinned {
			b.rescue(time.Now())
		}
	}
}

// rescue notes that this node has taken what was another's to take.
func (b *balance) rescue(now time.Time) {
	if now.Sub(b.rescued) > 4*b.keep {
		b.keep = keepLeast / 2
	}
	b.rescued, b.keep = now, min(2*b.keep, keepMost)
}

// gone notes that this node has a slot no longer. Where there is one slot only, there is nothing to note.
func (b *balance) gone(i int) {
	if b == nil {
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	delete(b.held, i)
	delete(b.giving, i)
	b.ask()
}

// ask has the table read anew.
func (b *balance) ask() {
	select {
	case b.poke <- struct{}{}:
	default:
	}
}
