package pipeline

import (
	"hash/maphash"
	"sync"
	"sync/atomic"
	"time"

	"github.com/outrelay/outrelay/internal/base/mailbox"
	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/relay/internal/ledger"
	"github.com/outrelay/outrelay/internal/relay/internal/resolved"
	"github.com/outrelay/outrelay/resume"
)

// Ledger is the part of the ledger that the resolver uses.
type Ledger interface {
	// Add queues outcomes and never blocks. Stored of each is called once it is stored, in the order of Add.
	Add(list ...*ledger.Outcome)
}

// Metrics are callbacks of the resolver. None may be nil.
type Metrics struct {
	Acked func(b *record.AckedBatch)             // records were acked; b is valid during the call
	Dead  func(topic string, class record.Class) // an envelope was dead-lettered
	Held  func(reason string, n int)             // n envelopes were stored to wait
}

// Config configures a Resolver.
type Config struct {
	// Pool limits the bytes that are read and not yet acked, and the tickets. The
	// resolver has a part of it from Start until LeavePool.
	Pool *Pool

	// Ledger stores the envelopes that are not sent now, and the deliveries that are recorded.
	Ledger Ledger
	// Ready gets the topics that can be written again.
	Ready *mailbox.Box[string]
	// Recycle takes back the ticket slices that were passed to Acked. It is called under the lock of the tracker. May be nil.
	Recycle func(tickets []record.Ticket)

	Metrics Metrics
	Now     func() time.Time // defaults to time.Now
}

// Resolver tracks the events of one term of ownership until each is resolved. It implements
// record.Acks and record.Holder. It exists before the sink, which reports to it, and calls nothing of the sink.
type Resolver struct {
	cfg        Config
	tracker    *resolved.Tracker[resume.Position]
	budget     *budget      // bytes of the stream
	sideBudget *budget      // bytes of the reconciler
	maxTickets atomic.Int64 // events above the resolved position; the Pool changes it

	gates     *gates
	reread    rereadWindow
	oweBelow  atomic.Uint64 // the first ticket after those for which HoldSwept holds
	followers followers

	ackedMu sync.Mutex
	acked   record.AckedBatch // reused for each ack

	// Deliveries outside of the stream's order.
	sidesInFlight atomic.Int64
	sideMu        sync.Mutex
	sides         map[record.Ticket]*side

	unrecorded atomic.Int64 // envelopes that are still to be stored as waiting or dead
}

var _ record.Acks = (*Resolver)(nil)

// NewResolver returns a resolver without events.
func NewResolver(cfg Config) *Resolver {
	if cfg.Now == nil {
		cfg.Now = time.Now
	}

	resolver := &Resolver{
		cfg:        cfg,
		tracker:    resolved.New[resume.Position](cfg.Recycle),
		budget:     newBudget(&cfg.Pool.stream),
		sideBudget: newBudget(&cfg.Pool.side),
		gates:      newGates(maxGates),
		sides:      map[record.Ticket]*side{},
	}
	resolver.maxTickets.Store(int64(cfg.Pool.tickets))
	return resolver
}

// Start joins the pool and sets the position that the term starts from. A checkpoint
// before the first event stores that position.
func (r *Resolver) Start(position resume.Position) {
	r.tracker.Position(position)
	r.cfg.Pool.addMember(r)
}

// LeavePool returns the resolver's share to the pool. Nothing may be delivered after it.
func (r *Resolver) LeavePool() { r.cfg.Pool.removeMember(r) }

// releaseBytes returns n bytes to budget. Other members of the pool may have been waiting
// for them.
func (r *Resolver) releaseBytes(budget *budget, n int64) {
	if budget.release(n) {
		r.cfg.Pool.wakeMembers()
	}
}

// Limits returns the bytes and tickets that the resolver may use at this moment. The
// Pool changes them when members join or leave.
func (r *Resolver) Limits() (bytes, tickets int64) {
	return r.budget.currentShare() + r.sideBudget.currentShare(), r.maxTickets.Load()
}

// EventNumber returns the number of the event at a position. It identifies the event within this process: an id does not,
// because it may be inserted again.
func EventNumber(pos []byte) uint64 { return maphash.Bytes(hashSeed, pos) }

// beginTicket assigns the next ticket to item. If its delivery is to be recorded, the
// ticket has one target more, which is resolved when the record is stored.
func (r *Resolver) beginTicket(item *Item) record.Ticket {
	targets := len(item.Records)
	if item.Sent == nil || targets == 0 {
		return r.tracker.Begin(item.CommitMS, targets, EventNumber(item.Pos))
	}

	ticket := r.tracker.Begin(item.CommitMS, targets+1, EventNumber(item.Pos))
	item.Sent.ticket = ticket
	return ticket
}

// Position marks position as reached once everything delivered so far is resolved. position must
// not alias a response.
func (r *Resolver) Position(position resume.Position) { r.tracker.Position(position) }

// hasRoom reports whether the window has room for another event.
func (r *Resolver) hasRoom() bool {
	return int64(r.tracker.Unresolved()) < r.maxTickets.Load()
}

// unsent has the parts of the stream that the outcome of an envelope resolves.
type unsent struct {
	ticket  record.Ticket
	targets int // of the ticket
	bytes   int64
}

// addUnsent closes gates and passes outcome to the ledger. When outcome is stored, its targets are resolved, so a checkpoint never passes an
// envelope that is not stored.
func (r *Resolver) addUnsent(outcome *ledger.Outcome, unsent unsent, gates ...gate) {
	outcome.MayBeSent = outcome.MayBeSent || r.isOfReread(unsent.ticket)
	delivered := r.followers.notifyLeft(outcome, unsent)
	for _, g := range gates {
		r.gates.changeWaiting(g.NS, g.Topic, g.Key, 1)
	}

	r.unrecorded.Add(1)
	outcome.Stored = func(outcome *ledger.Outcome) { r.resolveUnsent(outcome, unsent, gates) }
	r.cfg.Ledger.Add(outcome)

	// The letter of a dead target is stored before its envelope may be deleted.
	r.recordDeliveries(delivered)
}

// resolveUnsent resolves the targets of outcome, which is stored, and releases their bytes. A gate opens only now if the envelope does not
// wait after all: otherwise a later event of the key could be sent before an event that is repeated after a crash.
func (r *Resolver) resolveUnsent(outcome *ledger.Outcome, unsent unsent, gates []gate) {
	if !outcome.End.Waits() {
		for _, g := range gates {
			r.gates.changeWaiting(g.NS, g.Topic, g.Key, -1)
		}
	}

	r.unrecorded.Add(-1)
	for range unsent.targets {
		r.tracker.Resolve(unsent.ticket)
	}
	r.releaseBytes(r.budget, unsent.bytes)

	if outcome.End.Waits() {
		r.cfg.Metrics.Held(string(outcome.Reason), 1)
	} else {
		r.cfg.Metrics.Dead(outcome.Topic, outcome.Rejection.Class)
	}
}
