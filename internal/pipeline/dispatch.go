// Package pipeline hands the events of the change stream to the sink and tracks
// each of them until it is acked, or stored as waiting or dead.
//
// Order: events enter in the order of Deliver and reach each partition in that
// order. Publish delivers outside of that order, for the reconciler.
//
// An envelope that has to wait, or that cannot be sent at all, goes to the ledger with its stream position, and the stream goes
// on. If it waits, the gate of its key closes in the same step, so no later envelope can overtake it.
//
// Blocking: Deliver blocks while the byte budget or the window of tickets is full.
// Nothing else slows the reader down. The methods that the sink calls return at once.
//
// Cost: an event that is sent costs no allocation.
package pipeline

import (
	"context"
	"errors"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/outrelay/outrelay/internal/ledger"
	"github.com/outrelay/outrelay/internal/mailbox"
	"github.com/outrelay/outrelay/internal/record"
	"github.com/outrelay/outrelay/internal/waiting"
	"github.com/outrelay/outrelay/internal/watermark"
	"github.com/outrelay/outrelay/resume"
)

// Sink is the part of the Kafka sink that the dispatcher uses.
type Sink interface {
	// Size returns the bytes that rec reserves in the budget until it is acked.
	Size(rec *record.Record) int

	// Send queues rec and never blocks. If nothing was queued it returns
	// record.ErrParked, record.ErrBlocked or a *record.Refusal. Any other error
	// has ended the sink.
	Send(rec *record.Record, t record.Ticket) error

	// FindHit returns the place of rec if the read-back has found it in its topic.
	FindHit(rec *record.Record) (tp record.TopicPartition, offset int64, found bool)

	// TopicsWithHits returns the topics in which the read-back has found records.
	TopicsWithHits() []string

	// EndReplay drops the read-back.
	EndReplay()

	// Flush wakes the lanes that have something to send.
	Flush()

	// Recycle takes back a ticket slice that was passed to Acked.
	Recycle(tickets []record.Ticket)
}

// Ledger is the part of the ledger that the dispatcher uses.
type Ledger interface {
	// Add queues outcomes and never blocks. It calls Stored of each once it is stored, in the order of Add.
	Add(list ...*ledger.Outcome)
}

// Item is one event of the stream. The slices Raw, DB, Coll and Pos, and those of its
// records, may alias the server's reply.
type Item struct {
	CommitMS int64           // commit time in Unix milliseconds
	Records  []record.Record // one per target

	Dead   *record.Refusal // why the envelope can never be sent; nil if it can
	Sent   *Delivery       // the delivery to record; nil if it is not recorded
	Follow Follower        // observes the outcome for a trace; usually nil

	Raw      []byte // the envelope
	DB, Coll []byte // its collection
	Pos      []byte // position of its event, in hexadecimal
	Key      []byte // its ordering key; nil if it is malformed
}

// newOutcome returns the outcome of an envelope that is not sent now. It copies every slice that may alias the server's reply.
func (item *Item) newOutcome(end ledger.End) *ledger.Outcome {
	return &ledger.Outcome{
		End:       end,
		Raw:       slices.Clone(item.Raw),
		NS:        string(item.DB) + "." + string(item.Coll),
		Pos:       string(item.Pos),
		Key:       string(item.Key),
		Partition: record.AnyPartition,
	}
}

// Metrics are callbacks of the dispatcher. None may be nil.
type Metrics struct {
	Acked func(b *record.AckedBatch)             // records were acked; b is valid during the call
	Dead  func(topic string, class record.Class) // an envelope was dead-lettered
	Held  func(reason string, n int)             // n envelopes were stored to wait
}

// Config configures a Dispatcher.
type Config struct {
	// Pool limits the bytes that are read and not yet acked, and the tickets. The
	// dispatcher has a part of it from Start until LeavePool.
	Pool *Pool

	// Ledger stores the envelopes that are not sent now, and the deliveries that are recorded.
	Ledger Ledger
	// Ready gets the topics that can be written again.
	Ready *mailbox.Box[string]

	Metrics Metrics
	Now     func() time.Time // defaults to time.Now
}

// Dispatcher tracks the events of one term of ownership. It implements
// record.Acks and record.Holder.
//
// Deliver must not be called concurrently: the order of its calls is the order of
// the stream. No lock is held during a call to the sink, except to Recycle, which runs
// under the lock of the tracker.
type Dispatcher struct {
	cfg        Config
	sink       Sink
	tracker    *watermark.Tracker[resume.Position]
	budget     *budget      // bytes of the stream
	sideBudget *budget      // bytes of the reconciler
	maxTickets atomic.Int64 // events above the watermark; the Pool changes it

	gates     *gates
	replay    replayWindow
	followers followers

	heldScratch []int // used by Deliver only

	ackedMu sync.Mutex
	acked   record.AckedBatch // reused for each ack

	// Deliveries outside of the stream's order.
	sidesInFlight atomic.Int64
	sideMu        sync.Mutex
	sides         map[record.Ticket]*side

	unrecorded atomic.Int64 // envelopes that are still to be stored as waiting or dead
}

var _ record.Acks = (*Dispatcher)(nil)

// New returns a dispatcher. SetSink must be called before the first Deliver.
func New(cfg Config) *Dispatcher {
	if cfg.Now == nil {
		cfg.Now = time.Now
	}

	d := &Dispatcher{
		cfg:        cfg,
		budget:     newBudget(&cfg.Pool.stream),
		sideBudget: newBudget(&cfg.Pool.side),
		gates:      newGates(maxGates),
		sides:      map[record.Ticket]*side{},
	}
	d.maxTickets.Store(int64(cfg.Pool.tickets))

	d.tracker = watermark.New[resume.Position](func(tickets []record.Ticket) { d.sink.Recycle(tickets) })
	return d
}

// SetSink sets the sink. It is separate from New because the sink is opened with the
// dispatcher as its record.Acks.
func (d *Dispatcher) SetSink(s Sink) { d.sink = s }

// Start joins the pool and sets the position that the term starts from. A checkpoint
// before the first event stores that position.
func (d *Dispatcher) Start(p resume.Position) {
	d.tracker.Position(p)
	d.cfg.Pool.addMember(d)
}

// LeavePool returns the dispatcher's share to the pool. Nothing may be delivered after it.
func (d *Dispatcher) LeavePool() { d.cfg.Pool.removeMember(d) }

// releaseBytes returns n bytes to b. Other members of the pool may have been waiting
// for them.
func (d *Dispatcher) releaseBytes(b *budget, n int64) {
	if b.release(n) {
		d.cfg.Pool.wakeMembers()
	}
}

// Limits returns the bytes and tickets that the dispatcher may use at this moment. The
// Pool changes them when members join or leave.
func (d *Dispatcher) Limits() (bytes, tickets int64) {
	return d.budget.currentShare() + d.sideBudget.currentShare(), d.maxTickets.Load()
}

// Deliver sends one event to its targets. Calls must be made in stream order. It
// blocks while the budget or the window is full. It returns the cause of ctx if ctx
// ends, or the error that ended the sink. A target that refuses the event or makes it
// wait is no error: it goes to the ledger.
func (d *Dispatcher) Deliver(ctx context.Context, item *Item) error {
	if item.Dead != nil {
		return d.deliverDead(ctx, item)
	}

	// All targets are reserved together, so that no event reaches some of its targets
	// and then waits for room to reach the others (N13).
	size := 0
	for i := range item.Records {
		size += d.sink.Size(&item.Records[i])
	}

	// The sink is flushed before Deliver blocks: room comes only from acks.
	if err := d.budget.reserve(ctx, int64(size), d.hasRoom, d.sink.Flush); err != nil {
		return err
	}

	// From here on each target has to be resolved exactly once, by an ack or by an
	// exception. The watermark stops at this ticket until then.
	ticket := d.beginTicket(item)
	d.followers.trackEnvelope(ticket, item)

	d.heldScratch = d.heldScratch[:0]
	reason := waiting.Blocked
	for i := range item.Records {
		rec := &item.Records[i]
		err := d.sink.Send(rec, ticket)
		if err == nil {
			continue
		}

		// The target is parked (N11), or an earlier envelope of the key waits (N15).
		parked := errors.Is(err, record.ErrParked)
		if parked || errors.Is(err, record.ErrBlocked) {
			d.heldScratch = append(d.heldScratch, i)
			if parked {
				reason = waiting.Parked
			}
			continue
		}

		refusal, ok := errors.AsType[*record.Refusal](err)
		if !ok {
			return err
		}
		o := item.newOutcome(ledger.Dead)
		o.Topic, o.Refusal = rec.Topic, *refusal
		if !refusal.Class.DeadAtOnce() {
			o.End, o.Reason, o.Topics = ledger.Retrying, waiting.Retry, []string{rec.Topic}
		}
		d.addUnsent(o, unsent{ticket: ticket, targets: 1, bytes: int64(d.sink.Size(rec))})
	}

	// The targets that wait share one outcome, because they share one envelope.
	if len(d.heldScratch) > 0 {
		d.holdTargets(item, d.heldScratch, reason, ticket)
	}
	return nil
}

// beginTicket assigns the next ticket to item. If its delivery is to be recorded, the
// ticket has one target more, which is resolved when the record is stored.
func (d *Dispatcher) beginTicket(item *Item) record.Ticket {
	targets := len(item.Records)
	if item.Sent == nil || targets == 0 {
		return d.tracker.Begin(item.CommitMS, targets)
	}

	ticket := d.tracker.Begin(item.CommitMS, targets+1)
	item.Sent.ticket = ticket
	return ticket
}

// deliverDead queues the envelope of item as a dead letter. It blocks as Deliver does.
func (d *Dispatcher) deliverDead(ctx context.Context, item *Item) error {
	if err := d.budget.reserve(ctx, int64(len(item.Raw)), d.hasRoom, d.sink.Flush); err != nil {
		return err
	}

	ticket := d.tracker.Begin(item.CommitMS, 1)
	o := item.newOutcome(ledger.Dead)
	o.Refusal = *item.Dead
	d.addUnsent(o, unsent{ticket: ticket, targets: 1, bytes: int64(len(item.Raw))})
	return nil
}

// Position marks p as reached once everything delivered so far is resolved. p must
// not alias a reply.
func (d *Dispatcher) Position(p resume.Position) { d.tracker.Position(p) }

// Flush wakes the idle lanes of the sink.
func (d *Dispatcher) Flush() { d.sink.Flush() }

// hasRoom reports whether the window has room for another event.
func (d *Dispatcher) hasRoom() bool {
	return int64(d.tracker.Unresolved()) < d.maxTickets.Load()
}

// unsent has the parts of the stream that the outcome of an envelope resolves.
type unsent struct {
	ticket  record.Ticket
	targets int // of the ticket
	bytes   int64
}

// addUnsent closes gates and passes o to the ledger. When o is stored, its targets are resolved, so a checkpoint never passes an
// envelope that is not stored.
func (d *Dispatcher) addUnsent(o *ledger.Outcome, u unsent, gates ...gate) {
	d.recordDeliveries(d.followers.notifyLeft(o, u))

	for _, g := range gates {
		d.gates.changeWaiting(g.NS, g.Topic, g.Key, 1)
	}

	d.unrecorded.Add(1)
	o.Stored = func(o *ledger.Outcome) { d.resolveUnsent(o, u, gates) }
	d.cfg.Ledger.Add(o)
}

// resolveUnsent resolves the targets of o, which is stored, and releases their bytes. A gate opens only now if the envelope does not
// wait after all: otherwise a later event of the key could be sent before an event that is repeated after a crash.
func (d *Dispatcher) resolveUnsent(o *ledger.Outcome, u unsent, gates []gate) {
	if !o.End.Waits() {
		for _, g := range gates {
			d.gates.changeWaiting(g.NS, g.Topic, g.Key, -1)
		}
	}

	d.unrecorded.Add(-1)
	for range u.targets {
		d.tracker.Resolve(u.ticket)
	}
	d.releaseBytes(d.budget, u.bytes)

	if o.End.Waits() {
		d.cfg.Metrics.Held(string(o.Reason), 1)
	} else {
		d.cfg.Metrics.Dead(o.Topic, o.Refusal.Class)
	}
}
