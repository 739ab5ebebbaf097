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
	// refreshSoon is how long an attempt at a slot waits that other nodes have room for; meanwhile the table is read anew.
	refreshSoon = 50 * time.Millisecond
	// keepLeast and keepMost bound how long a node keeps what it took beyond its quota because nobody else did, so that slots do not
	// go round: longer each time.
	keepLeast = staleAfter
	keepMost  = 5 * time.Minute
)

// slotBalancer shares the slots among the nodes that live, without a leader: each node reads the same documents, computes the same
// quotas, attempts no slot beyond its own, and hands over one at a time of what it has too many. A slot is handed over as
// at any stop: its lease is released and acquired, and nothing is lost, repeated or out of order.
//
// A node counts as living while it gives signs of life, reaches Kafka if any node does, and has let no lease expire. A slot
// that stays free, because the node that has room for it does not take it, is anybody's.
type slotBalancer struct {
	relay    *Relay
	every    time.Duration
	patience time.Duration // with a slot that is free
	wakeup   chan struct{} // 1 slot

	mu          sync.Mutex
	table       slot.Table // as it was read last; no nodes before
	held        map[int]bool
	trying      map[int]bool
	handingOver map[int]bool      // held, and being handed over
	freeSince   map[int]time.Time // since when a slot was seen free
	rescuedAt   time.Time
	keepFor     time.Duration // since rescued
}

func newSlotBalancer(r *Relay) *slotBalancer {
	return &slotBalancer{
		relay: r, every: r.cfg.Lease.Renew, patience: max(3*r.cfg.Lease.Renew, time.Second), wakeup: make(chan struct{}, 1),
		held: map[int]bool{}, trying: map[int]bool{}, handingOver: map[int]bool{}, freeSince: map[int]time.Time{},
	}
}

// shareSlots keeps the table until work ends. When stop does the node leaves the others' tables at once.
func (b *slotBalancer) shareSlots(stop, work context.Context) error {
	tick := time.NewTicker(b.every)
	defer tick.Stop()
	stopping := stop.Done()
	for {
		if err := b.refreshTable(work); err != nil && work.Err() == nil {
			b.relay.state.setProblem("slots", "the slots cannot be shared: "+err.Error(), false)
		} else {
			b.relay.state.clearProblems("slots")
		}
		if stop.Err() == nil {
			b.handOverOne(time.Now())
		}
		select {
		case <-work.Done():
			return nil
		case <-stopping:
			stopping = nil
			b.relay.leaveNodes(work) // at once, so that its slots are shared out
		case <-tick.C:
		case <-b.wakeup:
			pause := time.NewTimer(refreshSoon)
			select {
			case <-pause.C:
			case <-work.Done():
			}
			pause.Stop()
		}
	}
}

// refreshTable reads who lives and who has what.
func (b *slotBalancer) refreshTable(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, beatEvery)
	defer cancel()
	listed, err := b.relay.nodes.List(ctx)
	if err != nil {
		return err
	}
	docs, err := b.readSlotDocuments(ctx)
	if err != nil {
		return err
	}
	t := slot.Table{Slots: make([]slot.Holding, b.relay.cfg.Slots)}
	lapsed := map[string]bool{}
	for i := range t.Slots {
		d, there := docs[slot.Part{I: i, N: b.relay.cfg.Slots}.ID(b.relay.cfg.Watcher)]
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
	t.Nodes = b.liveNodes(listed, lapsed)
	b.setTable(t, time.Now())
	for node := range lapsed {
		// It is noted for all, so that they reckon with it neither now nor when its slots are another's; if it lives, its next
		// sign says otherwise.
		if node != b.relay.cfg.Node {
			if err := b.relay.nodes.Lapsed(ctx, node); err != nil {
				return err
			}
		}
	}
	return nil
}

// liveNodes are the nodes to share with.
func (b *slotBalancer) liveNodes(list []store.Node, lapsed map[string]bool) []string {
	cfg := b.relay.cfg
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

func (b *slotBalancer) readSlotDocuments(ctx context.Context) (map[string]slotDocument, error) {
	coll := b.relay.mongo.state.Database(b.relay.cfg.MongoDB.State).Collection("watchers")
	ids := bson.A{}
	for _, p := range slot.Parts(b.relay.cfg.Slots) {
		ids = append(ids, p.ID(b.relay.cfg.Watcher))
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

func (b *slotBalancer) setTable(t slot.Table, now time.Time) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.table = t
	for i, s := range t.Slots {
		if s.Node != "" || !t.Loose(i) {
			delete(b.freeSince, i)
		} else if b.freeSince[i].IsZero() {
			b.freeSince[i] = now
		}
	}
}

// yieldReason is why a slot is handed over.
const yieldReason = "another node has fewer slots"

// handOverOne gives back one slot of those that are too many. How many there are it counts itself: what it has just handed over the
// table may show as its own for a while.
func (b *slotBalancer) handOverOne(now time.Time) {
	b.mu.Lock()
	defer b.mu.Unlock()
	self := b.relay.cfg.Node
	if len(b.table.Nodes) == 0 || now.Sub(b.rescuedAt) < b.keepFor {
		return
	}
	mine := 0
	for i := range b.table.Slots {
		if b.table.Loose(i) && b.held[i] && !b.handingOver[i] {
			mine++
		}
	}
	if mine <= b.table.Quota(self) {
		return
	}
	for i := len(b.table.Slots) - 1; i >= 0; i-- {
		s := b.relay.slots[i]
		if b.table.Slots[i].Node != self || !b.table.Loose(i) || !b.held[i] || b.handingOver[i] || s.state.hasRole(RoleHalted) {
			continue
		}
		select {
		case s.yield <- yieldReason:
			b.handingOver[i] = true
		default: // an earlier one was not heard yet
		}
		return
	}
}

// admitAttempt is lease.Config's: may this node attempt the slot?
func (b *slotBalancer) admitAttempt(i int, pinned bool) (time.Duration, func(bool)) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if len(b.table.Nodes) == 0 {
		b.requestRefresh()
		return refreshSoon, nil
	}
	mine := 0
	for j := range b.table.Slots {
		if b.table.Loose(j) && (b.held[j] || b.trying[j]) {
			mine++
		}
	}
	since, free := b.freeSince[i]
	rescue := free && time.Since(since) > b.patience
	beyond := mine >= b.table.Quota(b.relay.cfg.Node)
	if beyond && !pinned && !rescue {
		b.requestRefresh()
		return refreshSoon, nil
	}
	b.trying[i] = true
	return 0, func(won bool) {
		b.mu.Lock()
		defer b.mu.Unlock()
		delete(b.trying, i)
		delete(b.freeSince, i)
		if b.held[i] = won; won && beyond && !pinned {
			b.noteRescueLocked(time.Now())
		}
	}
}

// noteRescueLocked notes that this node has taken what was another's to take.
func (b *slotBalancer) noteRescueLocked(now time.Time) {
	if now.Sub(b.rescuedAt) > 4*b.keepFor {
		b.keepFor = keepLeast / 2
	}
	b.rescuedAt, b.keepFor = now, min(2*b.keepFor, keepMost)
}

// slotReleased notes that this node has a slot no longer. Where there is one slot only, there is nothing to note.
func (b *slotBalancer) slotReleased(i int) {
	if b == nil {
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	delete(b.held, i)
	delete(b.handingOver, i)
	b.requestRefresh()
}

// requestRefresh has the table read anew.
func (b *slotBalancer) requestRefresh() {
	select {
	case b.wakeup <- struct{}{}:
	default:
	}
}
