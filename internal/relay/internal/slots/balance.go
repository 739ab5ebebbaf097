// Package slots divides a watcher by ordering keys (N28): how many slots it has, which process runs which of
// them, and how the number changes.
//
// Sharing. Once per renewal, each node computes the quotas from the heartbeats and the watcher documents
// ([slot.Table]): even, with pinned slots counted, and with as few moves as possible. An expired lease removes
// its node from the tables of all nodes, so a crash costs one ttl. If no node takes a free slot within some
// renewals, any node may. It then keeps the slot for a while, longer each time: nodes whose tables differ would
// otherwise pass it to each other.
//
// Another number of slots. [Reslice] pauses and drains every slot, acquires every lease, and fences every
// transactional id as a takeover does. One transaction then replaces the documents. The new documents begin at
// the lowest position of all, by time, because their pipeline is another one. They have the lowest stored
// offsets and all old producer ids for the read-back. A slot that was ahead has delivered events below the
// offsets of a slot that was behind, so the documents also record how far each old range had come (passed), and
// the pump skips those events. The transaction copies the collections that other writers have added to dirty
// lists in the meantime. Epochs continue from the highest epoch, so that claims of old terms can be taken. Each
// new transactional id is listed as an earlier sender of its own slot: the first owner has to read a marker above
// the last listed sender, and cannot write markers for other ids. A pause applies to every new slot with some of
// the keys, a pin only if all old slots of the keys have it.
//
// Blocking: Balancer and Reslice block until their context ends or their work is done. All other functions
// make one call to MongoDB each.
package slots

import (
	"context"
	"slices"
	"sync"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/base/retry"
	"github.com/outrelay/outrelay/internal/contract/config"
	"github.com/outrelay/outrelay/internal/contract/slot"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/relay/stored/lease"
	"github.com/outrelay/outrelay/internal/relay/stored/nodes"
	"github.com/outrelay/outrelay/internal/relay/stored/state"
)

const (
	// refreshSoon is the time in which requests for a new table share one refresh.
	refreshSoon = 50 * time.Millisecond
	// keepLeast and keepMost bound how long a node keeps the slots that it took beyond its quota.
	// The time doubles with each such slot, so that slots are not passed around.
	keepLeast = nodes.StaleAfter
	keepMost  = 5 * time.Minute
)

// Balancer distributes the slots among the live nodes, without a leader. Each node reads the
// same documents, computes the same quotas, acquires no slot beyond its own quota, and hands over
// its surplus one slot at a time. A slot is handed over like at a stop: its lease is released and
// acquired, and no event is lost, repeated or reordered.
//
// A node counts as live while it sends heartbeats, reaches Kafka if any node does, and has let no
// lease expire. Any node may acquire a slot that stays free, because the node that has room for it
// does not acquire it.
type Balancer struct {
	cfg      config.Config
	state    state.Database
	nodes    *nodes.Nodes
	every    time.Duration // between two refreshes of the table
	patience time.Duration // after which any node may acquire a free slot
	wakeup   chan struct{} // capacity 1: refresh the table soon

	mu          sync.Mutex
	table       slot.Table        // as read last; it has no nodes before the first read
	held        map[int]bool      // slots that this node owns
	trying      map[int]bool      // slots that this node attempts to acquire
	handingOver map[int]bool      // slots in held that are being handed over
	freeSince   map[int]time.Time // when a slot was first seen free
	rescuedAt   time.Time         // when this node last acquired a slot beyond its quota
	keepFor     time.Duration     // how long this node hands over nothing after rescuedAt
}

// Process is the process that owns the slots of a node.
type Process interface {
	// ReportSharing sets or, if err is nil, clears the problem that the slots cannot be shared.
	ReportSharing(err error)
	// LeaveNodes removes this node from the list of nodes.
	LeaveNodes(ctx context.Context)
	// IsHalted reports whether slot i waits for an operator.
	IsHalted(i int) bool
	// RequestHandOver requests that slot i is handed over. It returns false if the slot has not
	// received an earlier request yet.
	RequestHandOver(i int, reason string) bool
}

// NewBalancer returns a balancer of the slots that cfg configures. It does no I/O. list contains
// the nodes of the watcher.
func NewBalancer(cfg config.Config, state state.Database, list *nodes.Nodes) *Balancer {
	return &Balancer{
		cfg:         cfg,
		state:       state,
		nodes:       list,
		every:       cfg.Lease.Renew,
		patience:    max(3*cfg.Lease.Renew, time.Second),
		wakeup:      make(chan struct{}, 1),
		held:        map[int]bool{},
		trying:      map[int]bool{},
		handingOver: map[int]bool{},
		freeSince:   map[int]time.Time{},
	}
}

// Run keeps the table up to date and hands over surplus slots of process, until work ends. When stop
// ends, it removes this node from the list of nodes at once, so that the other nodes acquire its
// slots.
func (b *Balancer) Run(stop, work context.Context, process Process) error {
	tick := time.NewTicker(b.every)
	defer tick.Stop()
	stopping := stop.Done()

	for {
		if err := b.refreshTable(work); err != nil && work.Err() == nil {
			process.ReportSharing(err)
		} else {
			process.ReportSharing(nil)
		}
		if stop.Err() == nil {
			b.handOverOne(time.Now(), process)
		}

		select {
		case <-work.Done():
			return nil

		case <-stopping:
			stopping = nil
			process.LeaveNodes(work)

		case <-tick.C:

		case <-b.wakeup:
			// Several slots may ask for a refresh at the same moment.
			_ = retry.Sleep(work, refreshSoon)
		}
	}
}

// refreshTable reads which nodes are live and which slots they own.
func (b *Balancer) refreshTable(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, nodes.BeatEvery)
	defer cancel()
	listed, err := b.nodes.List(ctx)
	if err != nil {
		return err
	}
	docs, err := b.readSlotDocuments(ctx)
	if err != nil {
		return err
	}

	table := slot.Table{Slots: make([]slot.Holding, b.cfg.Slots)}
	lapsed := map[string]bool{} // nodes that have let a lease expire
	for i := range table.Slots {
		document, ok := docs[slot.Range{I: i, N: b.cfg.Slots}.ID(b.cfg.Watcher)]
		if !ok {
			continue
		}

		table.Slots[i] = slot.Holding{Pin: document.Control.Pin, Paused: document.Control.Paused}
		switch {
		case document.Owner == "":
		case document.Live:
			table.Slots[i].Node = document.Node
		case !document.Control.Paused:
			// An expired lease shows a crash earlier than the missing heartbeats do.
			lapsed[document.Node] = true
		}
	}
	table.Nodes = b.liveNodes(listed, lapsed)
	b.setTable(table, time.Now())

	// The mark is stored, so that no node counts on the lapsed node, also after other nodes have
	// acquired its slots. If the node is alive, its next heartbeat removes the mark.
	for node := range lapsed {
		if node == b.cfg.Node {
			continue
		}
		if err := b.nodes.Lapsed(ctx, node); err != nil {
			return err
		}
	}
	return nil
}

// liveNodes returns the nodes that share the slots. It always includes this node.
func (b *Balancer) liveNodes(list []nodes.Node, lapsed map[string]bool) []string {
	cfg := b.cfg
	list = slices.DeleteFunc(list, func(n nodes.Node) bool {
		if n.Node == cfg.Node {
			return false
		}
		dead := !n.Alive(nodes.StaleAfter) || n.Lapsed || lapsed[n.Node]
		other := n.Slots != cfg.Slots || !slices.Contains(n.Watchers, cfg.Watcher) ||
			!slices.Contains(n.Tasks, string(nodes.Relay))
		return dead || other
	})

	// If no node reaches Kafka, the cause is Kafka and not the nodes.
	anyReaches := slices.ContainsFunc(list, func(n nodes.Node) bool { return n.KafkaReachable })
	out := []string{cfg.Node}
	for _, n := range list {
		if n.Node != cfg.Node && (n.KafkaReachable || !anyReaches) {
			out = append(out, n.Node)
		}
	}
	return out
}

// slotDocument contains the fields of a watcher document that the balancer needs.
type slotDocument struct {
	ID      string        `bson:"_id"`
	Owner   string        `bson:"owner"`
	Node    string        `bson:"node"`
	Live    bool          `bson:"live"` // the lease has not expired
	Control lease.Control `bson:"control"`
}

// readSlotDocuments returns the documents of all slots, by id.
func (b *Balancer) readSlotDocuments(ctx context.Context) (map[string]slotDocument, error) {
	coll := b.state.Collection("watchers")
	ids := bson.A{}
	for _, p := range slot.Ranges(b.cfg.Slots) {
		ids = append(ids, p.ID(b.cfg.Watcher))
	}

	// The server compares the expiry with its own clock.
	live := bson.E{Key: "live", Value: bson.D{{Key: "$gt", Value: bson.A{"$expiresAt", "$$NOW"}}}}
	list, err := mongodb.AggregateAll[slotDocument](ctx, coll, "reading the watcher documents", mongo.Pipeline{
		{{Key: "$match", Value: bson.D{{Key: "_id", Value: bson.D{{Key: "$in", Value: ids}}}}}},
		{{Key: "$project", Value: append(mongodb.Fields("owner", "node", "control"), live)}},
	})

	docs := make(map[string]slotDocument, len(list))
	for _, d := range list {
		docs[d.ID] = d
	}
	return docs, err
}

// setTable stores the table and updates since when slots are free.
func (b *Balancer) setTable(table slot.Table, now time.Time) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.table = table
	for i, s := range table.Slots {
		if s.Node != "" || !table.CountsForQuota(i) {
			delete(b.freeSince, i)
		} else if b.freeSince[i].IsZero() {
			b.freeSince[i] = now
		}
	}
}

// yieldReason is the reason with which a slot is handed over.
const yieldReason = "another node has fewer slots"

// handOverOne hands over one slot of process if this node has more than its quota.
func (b *Balancer) handOverOne(now time.Time, process Process) {
	b.mu.Lock()
	defer b.mu.Unlock()
	self := b.cfg.Node
	if len(b.table.Nodes) == 0 || now.Sub(b.rescuedAt) < b.keepFor {
		return
	}

	// The slots are not counted in the table: for a while it may show a slot that was just handed
	// over.
	mine := 0
	for i := range b.table.Slots {
		if b.table.CountsForQuota(i) && b.held[i] && !b.handingOver[i] {
			mine++
		}
	}
	if mine <= b.table.Quota(self) {
		return
	}

	for i := len(b.table.Slots) - 1; i >= 0; i-- {
		// A halted slot keeps its lease on purpose: another node would meet the same problem.
		if b.table.Slots[i].Node != self || !b.table.CountsForQuota(i) || !b.held[i] || b.handingOver[i] ||
			process.IsHalted(i) {
			continue
		}

		if process.RequestHandOver(i, yieldReason) {
			b.handingOver[i] = true
		}
		return
	}
}

// AdmitAttempt implements lease.Config.MayAttempt: it decides whether this node may attempt to acquire
// slot i. If so, it returns a function that must be called with the outcome, and otherwise nil.
func (b *Balancer) AdmitAttempt(i int, pinned bool) func(won bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if len(b.table.Nodes) == 0 {
		b.requestRefresh()
		return nil
	}

	mine := 0
	for j := range b.table.Slots {
		if b.table.CountsForQuota(j) && (b.held[j] || b.trying[j]) {
			mine++
		}
	}
	since, free := b.freeSince[i]
	rescue := free && time.Since(since) > b.patience
	beyond := mine >= b.table.Quota(b.cfg.Node)
	if beyond && !pinned && !rescue {
		b.requestRefresh()
		return nil
	}

	// Attempts count, so that slots that try at the same time do not exceed the quota together.
	b.trying[i] = true
	return func(won bool) {
		b.mu.Lock()
		defer b.mu.Unlock()
		delete(b.trying, i)
		delete(b.freeSince, i)
		b.held[i] = won
		if won && beyond && !pinned {
			b.noteRescueLocked(time.Now())
		}
	}
}

// noteRescueLocked records that this node has acquired a slot beyond its quota. The caller holds
// mu.
func (b *Balancer) noteRescueLocked(now time.Time) {
	if now.Sub(b.rescuedAt) > 4*b.keepFor {
		b.keepFor = keepLeast / 2
	}
	b.rescuedAt = now
	b.keepFor = min(2*b.keepFor, keepMost)
}

// NoteAcquired records that this node owns slot i. The attempt may have failed: if the server has carried it out, the next
// attempt finds the lease in the name of this process and needs no admission. It does nothing if b is nil, which means that
// there is one slot.
func (b *Balancer) NoteAcquired(i int) {
	if b == nil {
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.held[i] = true
}

// NoteReleased records that this node no longer owns slot i. It does nothing if b is nil, which
// means that there is one slot.
func (b *Balancer) NoteReleased(i int) {
	if b == nil {
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	delete(b.held, i)
	delete(b.handingOver, i)
	b.requestRefresh()
}

// requestRefresh requests that the table is read soon. It does not block.
func (b *Balancer) requestRefresh() {
	retry.Signal(b.wakeup)
}
