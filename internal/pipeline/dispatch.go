// Package pipeline hands the events of the change stream to the sink and tracks
// each of them until it is acked or recorded as an exception.
//
// Order: events enter in the order of Deliver and reach each partition in that
// order. Publish delivers outside of that order, for the reconciler.
//
// Exceptions: an envelope that has to wait, or that cannot be sent at all, is queued
// for Exceptions with its stream position, and the stream goes on. If it waits, the
// gate of its key closes in the same step, so no later envelope can overtake it.
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

	"github.com/outrelay/outrelay/internal/envelope"
	"github.com/outrelay/outrelay/internal/record"
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

	// EndReplay drops the read-back.
	EndReplay()

	// Flush wakes the lanes that have something to send.
	Flush()

	// Recycle takes back a ticket slice that was passed to Acked.
	Recycle(tickets []record.Ticket)
}

// Exception is an envelope that is not sent now: it waits, or it is dead.
type Exception struct {
	State   string   // state of an envelope that waits; empty for a dead letter
	Pending []string // topics that an envelope that waits must still reach
	Key     string   // ordering key of an envelope that waits

	// Raw is the envelope as the stream delivered it, Pos the position of its
	// event in hexadecimal. Both are empty if the sink returned the record after
	// it was queued. The envelope must then be read again from the stream, after
	// Floor, by ID and NSHash.
	Raw      []byte
	NS       string
	Pos      string
	Floor    resume.Position
	ID       []byte // value of the record's id header
	StringID bool   // ID is a string that looks like another type
	NSHash   []byte // value of the record's namespace header

	Topic   string // topic that refused the record; empty if none did
	Refusal record.Refusal

	ticket  record.Ticket
	targets int // targets of the ticket that this exception resolves
	bytes   int64
}

// Exceptions stores exceptions.
type Exceptions interface {
	// Restore sets the envelopes of exceptions that the sink has returned. It leaves Raw nil if an envelope is gone.
	Restore(ctx context.Context, list []Exception) error

	// Record stores batch in fenced transactions. When it returns nil they are
	// majority-committed (N3). Calls do not overlap. The batch is valid during the call.
	Record(ctx context.Context, batch []Exception) error
}

// Item is one event of the stream. The slices Raw, DB, Coll and Pos, and those of its
// records, may alias the server's reply.
type Item struct {
	CommitMS int64           // commit time in Unix milliseconds
	Records  []record.Record // one per target

	Dead   *record.Refusal // why the envelope can never be sent; nil if it can
	Sent   *Sent           // the delivery to record; nil if it is not recorded
	Follow Follower        // observes the outcome for a trace; usually nil

	Raw      []byte // the envelope
	DB, Coll []byte // its collection
	Pos      []byte // position of its event, in hexadecimal
}

// newException returns an exception for the envelope of item. It copies every slice
// that may alias the server's reply.
func (item *Item) newException(why record.Refusal, t record.Ticket, bytes int) Exception {
	return Exception{
		Raw:     slices.Clone(item.Raw),
		NS:      string(item.DB) + "." + string(item.Coll),
		Pos:     string(item.Pos),
		Refusal: why,
		ticket:  t,
		targets: 1,
		bytes:   int64(bytes),
	}
}

// Metrics are callbacks of the dispatcher. None may be nil.
type Metrics struct {
	Acked func(b *record.AckedBatch)             // records were acked; b is valid during the call
	Dead  func(topic string, class record.Class) // an envelope was dead-lettered
	Held  func(state string, n int)              // n envelopes were recorded to wait
}

// Config configures a Dispatcher.
type Config struct {
	// Pool limits the bytes that are read and not yet acked, and the tickets. The
	// dispatcher has a part of it from Start until LeavePool.
	Pool *Pool

	Exceptions Exceptions
	Recorder   Recorder

	// Ready is called when a parked topic can be written again. It must not block.
	Ready func(topic string)

	// Retry repeats op until it succeeds, ctx ends or its error is final.
	Retry func(ctx context.Context, op func() error) error

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

	deliveries *recordQueue[*Sent] // resolved for every target, to be recorded on their envelopes
	exceptions *recordQueue[Exception]
	unrecorded atomic.Int64 // exceptions that are queued or being recorded
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
		deliveries: newRecordQueue[*Sent](),
		exceptions: newRecordQueue[Exception](),
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
// wait is no error: it becomes an exception.
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
	heldState := envelope.StateBlocked
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
				heldState = envelope.StateParked
			}
			continue
		}

		refusal, ok := errors.AsType[*record.Refusal](err)
		if !ok {
			return err
		}
		e := item.newException(*refusal, ticket, d.sink.Size(rec))
		e.Topic = rec.Topic
		d.queueException(e)
	}

	// The targets that wait share one exception, because they share one envelope.
	if len(d.heldScratch) > 0 {
		d.holdTargets(item, d.heldScratch, heldState, ticket)
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
	d.queueException(item.newException(*item.Dead, ticket, len(item.Raw)))
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

// queueException closes gates and queues e for Run.
func (d *Dispatcher) queueException(e Exception, gates ...gate) {
	d.queueDeliveries(d.followers.notifyLeft(&e))

	for _, g := range gates {
		d.gates.changeWaiting(g.NS, g.Topic, g.Key, 1)
	}

	d.unrecorded.Add(1)
	d.exceptions.add(e)
}
