// Package dispatch brings each event of the stream to the sink and follows it until its fate is known.
//
// Order: events enter in the order of Deliver, and reach each partition in that order. Blocking: Deliver blocks while the
// byte budget or the window of 200,000 tickets is full, and that is the only brake on the reader. Everything that the sink
// calls returns at once. Cost: no allocation per event. Not promised: that a target which cannot be written lets the others
// pass for ever; it holds the watermark, and the budget fills up behind it (State says so).
package dispatch

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/outrelay/outrelay/internal/record"
	"github.com/outrelay/outrelay/internal/watermark"
	"github.com/outrelay/outrelay/resume"
)

// MaxTickets is N13's window: with more events above the watermark, reading stops.
const MaxTickets = 200_000

// Sink is what the dispatcher needs of Kafka. Send never blocks; what it returns is a *record.Refusal, or the error that
// ended the sink.
type Sink interface {
	Size(rec *record.Record) int
	Send(rec *record.Record, t record.Ticket) error
	Flush()
	Recycle(tickets []record.Ticket)
}

// Exception is an envelope whose fate is written down instead of sent.
type Exception struct {
	// Raw is the envelope as the stream showed it; nil when the sink refused a record later, and the image has to be read
	// again from the stream, after Floor, by ID and NS (the values of the record's headers).
	Raw    []byte
	NS     string
	Pos    string // hex position of the stream event, empty with Raw
	Floor  resume.Position
	ID     []byte
	NSHash []byte
	Topic  string // the target that refused it; empty if it never had one
	Why    record.Refusal

	ticket record.Ticket
	bytes  int64
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
	// Raw is the envelope, DB and Coll its collection, Pos the hexadecimal position of its event; they may alias a reply.
	Raw, DB, Coll, Pos []byte
}

// exception makes an exception of the envelope, with copies of what aliases the reply.
func (it *Item) exception(why record.Refusal, t record.Ticket, bytes int) Exception {
	return Exception{
		Raw: slices.Clone(it.Raw), NS: string(it.DB) + "." + string(it.Coll), Pos: string(it.Pos),
		Why: why, ticket: t, bytes: int64(bytes),
	}
}

// Metrics is what the dispatcher reports; each function may be nil.
type Metrics struct {
	Published func(topic string, n int)
	Dead      func(topic string, class record.Class)
	Latency   func(ms float64)
	Waited    func()
}

// Config is what a Dispatcher needs.
type Config struct {
	Budget     int64 // bytes read and not yet acked; must be positive
	MaxTickets int   // Defaults to MaxTickets
	Exceptions Exceptions
	Retry      func(ctx context.Context, op func() error) error // repeats op until it succeeds, ctx ends or it is final
	Metrics    Metrics
	Log        *slog.Logger
	Now        func() time.Time // Defaults to time.Now
}

// Dispatcher follows the events of one term of ownership. It implements record.Acks.
type Dispatcher struct {
	cfg     Config
	budget  *budget
	tracker *watermark.Tracker[resume.Position]
	sink    Sink

	mu         sync.Mutex
	exceptions []Exception
	stuck      map[string]*Stuck
	wake       chan struct{} // one token: there are exceptions to write
	times      []int64       // scratch of observe, under obs
	obs        sync.Mutex
}

// Stuck is a record that Kafka refuses and that is not dead at once: it holds the watermark.
type Stuck struct {
	Topic  string
	Reason string
	Since  time.Time
	Count  int
}

var _ record.Acks = (*Dispatcher)(nil)

// New makes a dispatcher; Use gives it its sink before the first Deliver.
func New(cfg Config) *Dispatcher {
	if cfg.MaxTickets == 0 {
		cfg.MaxTickets = MaxTickets
	}
	if cfg.Now == nil {
		cfg.Now = time.Now
	}
	d := &Dispatcher{cfg: cfg, budget: newBudget(cfg.Budget), wake: make(chan struct{}, 1), stuck: map[string]*Stuck{}}
	d.tracker = watermark.New[resume.Position](func(ts []record.Ticket) {
		if d.sink != nil {
			d.sink.Recycle(ts)
		}
	})
	return d
}

// Use sets the sink: it is opened with the dispatcher as its Acks, so it comes second.
func (d *Dispatcher) Use(s Sink) { d.sink = s }

// Start sets the position that the term starts from, so that a checkpoint before the first event keeps it.
func (d *Dispatcher) Start(p resume.Position) { d.tracker.Position(p) }

// Deliver hands one event on, in stream order. It blocks while the budget or the window is full, and returns the cause of
// ctx's end, or the error that ended the sink.
func (d *Dispatcher) Deliver(ctx context.Context, it *Item) error {
	if it.Dead != nil {
		return d.dead(ctx, it)
	}
	size := 0
	for i := range it.Records {
		size += d.sink.Size(&it.Records[i])
	}
	if err := d.budget.reserve(ctx, int64(size), d.room, d.waiting); err != nil {
		return err
	}
	t := d.tracker.Begin(it.CommitMS, len(it.Records))
	for i := range it.Records {
		rec := &it.Records[i]
		err := d.sink.Send(rec, t)
		if err == nil {
			continue
		}
		why, ok := errors.AsType[*record.Refusal](err)
		if !ok {
			return err
		}
		e := it.exception(*why, t, d.sink.Size(rec))
		e.Topic = rec.Topic
		d.refuse(e)
	}
	return nil
}

func (d *Dispatcher) dead(ctx context.Context, it *Item) error {
	if err := d.budget.reserve(ctx, int64(len(it.Raw)), d.room, d.waiting); err != nil {
		return err
	}
	d.refuse(it.exception(*it.Dead, d.tracker.Begin(it.CommitMS, 1), len(it.Raw)))
	return nil
}

// Position marks p as reached once everything delivered so far is resolved. p must not alias a reply.
func (d *Dispatcher) Position(p resume.Position) { d.tracker.Position(p) }

// Flush wakes the sink's idle lanes.
func (d *Dispatcher) Flush() { d.sink.Flush() }

func (d *Dispatcher) room() bool { return d.tracker.Unresolved() < d.cfg.MaxTickets }

// waiting runs before Deliver blocks: what is queued must be on its way, or nobody would ever make room.
func (d *Dispatcher) waiting() {
	d.sink.Flush()
	if d.cfg.Metrics.Waited != nil {
		d.cfg.Metrics.Waited()
	}
}

// refuse queues an exception for Run, or holds the watermark where the class wants a retry (N17).
func (d *Dispatcher) refuse(e Exception) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if !e.Why.Class.DeadAtOnce() {
		s := d.stuck[e.Topic]
		if s == nil {
			s = &Stuck{Topic: e.Topic, Reason: e.Why.Error(), Since: d.cfg.Now()}
			d.stuck[e.Topic] = s
			d.cfg.Log.Error("Kafka refuses a record of this topic; the watermark waits for it", "topic", e.Topic, "reason", e.Why.Error())
		}
		s.Count++
		return
	}
	d.exceptions = append(d.exceptions, e)
	select {
	case d.wake <- struct{}{}:
	default:
	}
}

// Stuck lists what holds the watermark for a reason of its own.
func (d *Dispatcher) Stuck() []Stuck {
	d.mu.Lock()
	defer d.mu.Unlock()
	list := make([]Stuck, 0, len(d.stuck))
	for _, s := range d.stuck {
		list = append(list, *s)
	}
	return list
}
