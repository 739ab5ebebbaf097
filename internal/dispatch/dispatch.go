// Package dispatch brings each event of the stream to the sink and follows it until its fate is known.
//
// Order: events enter in the order of Deliver, and reach each partition in that order. Blocking: Deliver blocks while the
// byte budget or the window of tickets is full, and that is the only brake on the reader. Everything that the sink
// calls returns at once. Cost: no allocation per event that is sent. An envelope that has to wait is handed to Exceptions
// with its position, its gate closes, and the stream goes on; who publishes it later does so by Publish, which takes no
// part in the order of the stream.
package dispatch

import (
	"context"
	"errors"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/outrelay/outrelay/internal/record"
	"github.com/outrelay/outrelay/internal/watermark"
	"github.com/outrelay/outrelay/pkg/event"
	"github.com/outrelay/outrelay/resume"
)

// Sink is what the dispatcher needs of Kafka. Send never blocks; what it returns is a *record.Refusal, or the error that
// ended the sink.
type Sink interface {
	Size(rec *record.Record) int
	Send(rec *record.Record, t record.Ticket) error
	// Take acks a record that a read-back has found, from within the call; false says that it was not found, and nothing was
	// done.
	Take(rec *record.Record, t record.Ticket) bool
	Flush()
	Recycle(tickets []record.Ticket)
}

// Exception is an envelope whose fate is written down instead of sent: it is dead, or it waits.
type Exception struct {
	// State is that of the envelope that waits; empty makes it a dead letter.
	State   string
	Pending []string // of one that waits: the targets that are to be sent yet
	Key     string   // of one that waits: its ordering key
	// Raw is the envelope as the stream showed it; nil when the sink gave a record back later, and the image has to be read
	// again from the stream, after Floor, by ID and NSHash (the values of the record's headers).
	Raw      []byte
	NS       string
	Pos      string // hex position of the stream event, empty with Raw
	Floor    resume.Position
	ID       []byte
	StringID bool // ID is a string that reads like another type
	NSHash   []byte
	Topic    string // the target that refused it; empty if it never had one
	Why      record.Refusal

	ticket  record.Ticket
	targets int // of the ticket, that it resolves
	bytes   int64
}

// Exceptions writes exceptions down: fenced, and majority-committed when it returns nil (N3). It is called by one
// goroutine at a time.
type Exceptions interface {
	Record(ctx context.Context, batch []Exception) error
}

// Item is one event of the stream.
type Item struct {
	CommitMS int64           // commit time, Unix milliseconds
	Records  []record.Record // one for each target
	// Dead is why the envelope cannot be sent at all.
	Dead *record.Refusal
	// Sent is not nil when the delivery has to be written down.
	Sent *Sent
	// Follow hears what becomes of each record; nil, in the usual case, for nobody.
	Follow Follower
	// Raw is the envelope, DB and Coll its collection, Pos the hexadecimal position of its event; they may alias a reply.
	Raw, DB, Coll, Pos []byte
}

// newException makes an exception of the envelope, with copies of what aliases the reply.
func (it *Item) newException(why record.Refusal, t record.Ticket, bytes int) Exception {
	return Exception{
		Raw: slices.Clone(it.Raw), NS: string(it.DB) + "." + string(it.Coll), Pos: string(it.Pos),
		Why: why, ticket: t, targets: 1, bytes: int64(bytes),
	}
}

// Metrics is what the dispatcher reports.
type Metrics struct {
	Published func(topic string, n int)
	Dead      func(topic string, class record.Class)
	Held      func(state string, n int)
	Latency   func(ms float64)
}

// Config is what a Dispatcher needs.
type Config struct {
	Pool       *Pool // bounds the bytes read and not yet acked, and the tickets; d has a part of it from Start until Leave
	Exceptions Exceptions
	Recorder   Recorder
	Ready      func(topic string) // hears that a topic that was parked can be written again; must not block
	// Found hears that records of ours stand in a partition that was read late, whose stored offset waits until let is called;
	// must not block. What was decided before is written down when ready reports true.
	Found   func(ready func() bool, let func())
	Retry   func(ctx context.Context, op func() error) error // repeats op until it succeeds, ctx ends or it is final
	Metrics Metrics
	Now     func() time.Time // Defaults to time.Now
}

// Dispatcher follows the events of one term of ownership. It implements record.Acks.
type Dispatcher struct {
	cfg    Config
	budget *budget
	// maxTickets is how many events may stand above the watermark.
	maxTickets atomic.Int64
	tracker    *watermark.Tracker[resume.Position]
	sink       Sink

	sideBudget    *budget // the reconciler's share
	gates    *gates
	replay   replayWindow
	followers followers
	sidesInFlight  atomic.Int64  // deliveries outside of the stream's order
	foundCalls    atomic.Uint64 // calls of Found
	sideMu   sync.Mutex
	sides    map[record.Ticket]*side

	sentMu   sync.Mutex
	deliveries []*Sent
	deliveryWake   chan struct{} // one token: there are deliveries to write down

	mu         sync.Mutex
	exceptions []Exception
	writing    bool          // some of them are being written
	exceptionWake       chan struct{} // one token: there are exceptions to write
	latencyScratch      []int64       // scratch of observe, under obs
	latencyMu        sync.Mutex
	heldScratch       []int // scratch of Deliver
}

var _ record.Acks = (*Dispatcher)(nil)

// New makes a dispatcher; Use gives it its sink before the first Deliver.
func New(cfg Config) *Dispatcher {
	if cfg.Now == nil {
		cfg.Now = time.Now
	}
	d := &Dispatcher{
		cfg: cfg, budget: newBudget(&cfg.Pool.stream), sideBudget: newBudget(&cfg.Pool.side), gates: newGates(maxGates), exceptionWake: make(chan struct{}, 1),
		sides: map[record.Ticket]*side{}, deliveryWake: make(chan struct{}, 1),
	}
	d.maxTickets.Store(int64(cfg.Pool.tickets))
	d.tracker = watermark.New[resume.Position](func(ts []record.Ticket) { d.sink.Recycle(ts) })
	return d
}

// Use sets the sink: it is opened with the dispatcher as its Acks, so it comes second.
func (d *Dispatcher) Use(s Sink) { d.sink = s }

// Start sets the position that the term starts from, so that a checkpoint before the first event keeps it.
func (d *Dispatcher) Start(p resume.Position) {
	d.tracker.Position(p)
	d.cfg.Pool.addMember(d)
}

// Leave gives what it has of the pool back, when nothing is delivered any more.
func (d *Dispatcher) Leave() { d.cfg.Pool.removeMember(d) }

// releaseBytes gives n bytes back to a budget.
func (d *Dispatcher) releaseBytes(b *budget, n int64) {
	if b.release(n) {
		d.cfg.Pool.wakeMembers()
	}
}

// Limits are the bytes and the tickets that it may have at this moment.
func (d *Dispatcher) Limits() (bytes, tickets int64) {
	return d.budget.currentShare() + d.sideBudget.currentShare(), d.maxTickets.Load()
}

// Deliver hands one event on, in stream order. It blocks while the budget or the window is full, and returns the cause of
// ctx's end, or the error that ended the sink.
func (d *Dispatcher) Deliver(ctx context.Context, it *Item) error {
	if it.Dead != nil {
		return d.deliverDead(ctx, it)
	}
	size := 0
	for i := range it.Records {
		size += d.sink.Size(&it.Records[i])
	}
	// Before Deliver blocks, what is queued must be on its way, or nobody would ever make room.
	if err := d.budget.reserve(ctx, int64(size), d.hasRoom, d.sink.Flush); err != nil {
		return err
	}
	t := d.beginTicket(it)
	d.followers.trackEnvelope(t, it)
	d.heldScratch = d.heldScratch[:0]
	state := event.StateBlocked
	for i := range it.Records {
		rec := &it.Records[i]
		err := d.sink.Send(rec, t)
		switch {
		case err == nil:
			continue
		case errors.Is(err, record.ErrParked):
			state = event.StateParked
			fallthrough
		case errors.Is(err, record.ErrBlocked):
			d.heldScratch = append(d.heldScratch, i)
			continue
		}
		why, ok := errors.AsType[*record.Refusal](err)
		if !ok {
			return err
		}
		e := it.newException(*why, t, d.sink.Size(rec))
		e.Topic = rec.Topic
		d.queueException(e)
	}
	if len(d.heldScratch) > 0 {
		d.holdTargets(it, d.heldScratch, state, t)
	}
	return nil
}

// beginTicket gives the event its ticket. One whose delivery is to be written down has a target more.
func (d *Dispatcher) beginTicket(it *Item) record.Ticket {
	n := len(it.Records)
	if it.Sent == nil || n == 0 {
		return d.tracker.Begin(it.CommitMS, n)
	}
	t := d.tracker.Begin(it.CommitMS, n+1)
	it.Sent.ticket = t // the last target is the record of the delivery
	return t
}

func (d *Dispatcher) deliverDead(ctx context.Context, it *Item) error {
	if err := d.budget.reserve(ctx, int64(len(it.Raw)), d.hasRoom, d.sink.Flush); err != nil {
		return err
	}
	d.queueException(it.newException(*it.Dead, d.tracker.Begin(it.CommitMS, 1), len(it.Raw)))
	return nil
}

// Position marks p as reached once everything delivered so far is resolved. p must not alias a reply.
func (d *Dispatcher) Position(p resume.Position) { d.tracker.Position(p) }

// Flush wakes the sink's idle lanes.
func (d *Dispatcher) Flush() { d.sink.Flush() }

func (d *Dispatcher) hasRoom() bool { return int64(d.tracker.Unresolved()) < d.maxTickets.Load() }

// queueException closes the gates of an exception and queues it for Run.
func (d *Dispatcher) queueException(e Exception, gates ...Gate) {
	d.queueDeliveries(d.followers.notifyLeft(&e))
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, g := range gates {
		d.gates.changeWaiting(g.NS, g.Topic, g.Key, 1)
	}
	d.exceptions = append(d.exceptions, e)
	select {
	case d.exceptionWake <- struct{}{}:
	default:
	}
}
