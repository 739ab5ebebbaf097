package reconcile

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/lease"
	"github.com/outrelay/outrelay/internal/record"
	"github.com/outrelay/outrelay/internal/retry"
	"github.com/outrelay/outrelay/internal/store"
)

// Outlet is the way to Kafka outside of the stream's order, for envelopes that were retried, held, scheduled or replayed.
type Outlet interface {
	// Publish hands one envelope to the sink, for those of topics, or for all that it routes to if topics is nil. It may
	// block for room in the reconciler's share of the memory; then it wakes the sink by itself. A [*record.Refusal] says
	// that the envelope is at fault; after any other error nothing was sent. After nil, answer is called exactly once, when
	// each target has its answer, also from within Publish; it does not block. e is the sink's during the call only.
	Publish(ctx context.Context, e *Envelope, topics []string, answer func(record.Published)) error
	// Settle says that what became of these deliveries is majority-committed (N8). It is called exactly once for each that
	// was answered, unless the lease was lost before.
	Settle(tickets []record.Ticket)
	// Open takes one off the gate of a key (N15): an exception of the stream is finished or dead for that topic.
	Open(ns, topic, key string)
	// Reached is the watermark's position: what comes at or below it in the stream has come.
	Reached() string
	// Resume lets deliveries of a key go on after one of it was refused or taken back. It does nothing where nothing waits.
	Resume(ns, topic, key string)
	// Flush wakes the sink after a run of Publish.
	Flush()
}

// Delivery is one envelope on its way outside of the stream's order: what has to be known of it until its fate is written.
// Nothing of it may alias a reply.
type Delivery struct {
	NS      string
	ID      bson.RawValue
	Number  int32    // its field `delivery`
	Key     string   // canonical text of the ordering key
	State   string   // as it was read; "" for a scheduled envelope
	Pos     string   // with Claim, the position it gets as an exception; defaults to that of now
	Origin  string   // as stored
	Claim   string   // token of the claim of a scheduled envelope (N19)
	Pending []string // targets that had not got it; nil: all that it routes to
	// Attempts that failed before.
	Attempts int32
	// Latched leaves Resume to the caller, who knows when all of the key has come back.
	Latched bool
	// Done hears once of its fate, after that is majority-committed, from the goroutine of the Finisher. It does not block,
	// and may publish nothing itself. May be nil.
	Done func(Fate)
	// Flight is what Scheduled knows a delivery of its own by.
	Flight uint64
}

// Fate is what became of a delivery.
type Fate struct {
	End     End
	Left    []string     // topics that have not got it, for Retrying and Waiting; nil: all
	Refused []string     // topics that refused it
	Held    []string     // topics that took it back or did not take it
	Class   record.Class // of a dead or failed one
}

// End is the kind of a Fate.
type End uint8

// The ends of a delivery.
const (
	Finished End = iota // each target has it
	Retrying            // it failed, and waits for its next attempt
	Waiting             // it is held as it was
	Dead                // it is a dead letter
	Dropped             // it expired and was discarded
	Gone                // somebody removed it, or made it another delivery, while it was on its way
	endCount
)

func (e End) String() string {
	return [...]string{"finished", "retrying", "waiting", "dead", "dropped", "gone"}[e]
}

// Finishing is what a Finisher works with.
type Finishing struct {
	Client *mongo.Client // for reads; a transaction brings its own
	Fencer store.Fencer
	Outlet Outlet
	// Retry is the wait before the next attempt; after MaxAttempts an envelope is dead.
	Retry       retry.Policy
	MaxAttempts int
	Recording   string // watermark, delete or mark
	DropExpired bool   // else an expired envelope is a dead letter
	Watcher     string
	Node        string
	Version     string
	Epoch       int64
	Seal        []byte           // of the state database, see [store.Registry.Seal]
	Now         func() time.Time // the server's
	Log         *slog.Logger     // nil for none
	// Trouble hears of each write that failed and is tried again, Well of each that succeeded after one. Both may be nil.
	Trouble func(error)
	Well    func()
	// Count adds to the counters of what became of deliveries. May be nil.
	Count func(end End, class record.Class, n int)
}

// decision is a delivery whose fate is decided.
type decision struct {
	*Delivery
	fate      Fate
	ticket    record.Ticket
	hasTicket bool // there is a ticket
	acked     []store.SentTo
	outcome   *store.Outcome // what to write, nil for nothing or for a letter
	dead      *deadReason    // to move, nil for none
	moved     bool           // it was moved
	postponed bool           // the server does not take it
}

// deadReason is why a delivery is dead.
type deadReason struct {
	class     record.Class
	reason    string
	topic     string
	partition int32
	failure   *store.ExceptionError // the attempt that was the last, nil if the class alone tells it
}

// Finisher writes down what became of deliveries outside of the stream's order. Each write is a fenced transaction (N3) of as many as
// have been answered since the last one, at most [store.MaxExceptions]; only after it is majority-committed are their
// offsets given free (N8), their gates opened (N15) and their owners told. When the lease is lost nothing more is written.
//
// Answered, Refused and Drain may be called from any goroutine. What it holds is bounded by what is in flight.
type Finisher struct {
	config Finishing

	mu            sync.Mutex
	queue         []*decision
	removals      removalQueue
	yieldingSince time.Time     // since when those of spent give way; zero if they do not
	writing       int           // taken from the queues, not told yet
	scheduled     dueSource     // of the scheduled ones; nil if there are none
	wake          chan struct{} // holds one token
	drained       chan struct{} // closed when nothing is left; nil while nobody waits
	postponed     []*decision   // what the server did not take, for another time
	seq           uint32
	failing       bool
	partSize      *store.PartSize // deliveries in one transaction
}

// postponeFor is how long what the server does not take waits for the next try.
const postponeFor = 5 * time.Second

// NewFinisher makes a Finisher. It writes nothing until Run.
func NewFinisher(c Finishing) *Finisher {
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	return &Finisher{config: c, wake: make(chan struct{}, 1), partSize: store.NewPartSize(store.MaxExceptions)}
}

// Answered takes over a delivery with all of its answers. It does not block.
func (f *Finisher) Answered(d *Delivery, p record.Published) {
	if f.onlyRemovalLeft(d, p.Answers) {
		f.mu.Lock()
		f.removals.appendRemoval(removal{ns: d.NS, id: d.ID, flight: d.Flight, ticket: p.Ticket, number: d.Number})
		f.mu.Unlock()
		f.wakeUp()
		return
	}
	a := &decision{Delivery: d, ticket: p.Ticket, hasTicket: true}
	f.decideFate(a, p.Answers)
	f.enqueue(a)
}

// Refused takes over a delivery that was not published, because it is at fault itself. It does not block.
func (f *Finisher) Refused(d *Delivery, why *record.Refusal) {
	a := &decision{Delivery: d}
	if why.Class == record.Expired && f.config.DropExpired {
		a.fate = Fate{End: Dropped, Class: why.Class, Left: d.Pending, Refused: d.Pending}
		a.outcome = a.newOutcome(store.FateDropped)
	} else {
		f.decideRefused(a, why, d.Pending, d.Pending, record.Answer{Partition: record.AnyPartition})
	}
	f.enqueue(a)
}

func (f *Finisher) enqueue(a *decision) {
	f.mu.Lock()
	f.queue = append(f.queue, a)
	f.mu.Unlock()
	f.wakeUp()
}

func (f *Finisher) wakeUp() {
	select {
	case f.wake <- struct{}{}:
	default:
	}
}

// Run writes until ctx ends or the lease is lost, and returns the cause.
func (f *Finisher) Run(ctx context.Context) error {
	again := time.NewTicker(postponeFor)
	defer again.Stop()
	for {
		next, wait := f.checkRemovals()
		batch := f.nextBatch(next && !wait)
		if len(batch) > 0 {
			if err := f.writeAndRelease(ctx, batch); err != nil {
				return err
			}
			continue
		}
		var later <-chan time.Time
		if wait {
			later = time.After(5 * time.Millisecond)
		}
		select {
		case <-f.wake:
		case <-later:
		case <-again.C:
			f.retryPostponed()
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// nextBatch is what the next transaction gets, in the order in which it was answered; tidy says that it may be what was sent.
func (f *Finisher) nextBatch(tidy bool) []*decision {
	f.mu.Lock()
	defer f.mu.Unlock()
	var batch []*decision
	if n := min(len(f.queue), store.MaxExceptions); n > 0 || !tidy {
		batch = f.queue[:n:n]
		if f.queue = f.queue[n:]; len(f.queue) == 0 {
			f.queue = nil
		}
	} else {
		batch = f.nextRemovalsLocked()
	}
	f.writing = len(batch)
	return batch
}

// Drain waits until everything that was answered is written, except for what the server does not take. It needs Run to be
// under way.
func (f *Finisher) Drain(ctx context.Context) error {
	for {
		f.mu.Lock()
		if len(f.queue) == 0 && len(f.removals) == 0 && f.writing == 0 {
			f.mu.Unlock()
			return nil
		}
		if f.drained == nil {
			f.drained = make(chan struct{})
		}
		wait := f.drained
		f.mu.Unlock()
		select {
		case <-wait:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// writeAndRelease makes the fate of a batch durable, then tells of it.
func (f *Finisher) writeAndRelease(ctx context.Context, batch []*decision) error {
	if err := f.writeBatch(ctx, batch); err != nil {
		return err
	}
	told := batch[:0]
	f.mu.Lock()
	for _, a := range batch {
		if a.postponed {
			f.postponed = append(f.postponed, a)
		} else {
			told = append(told, a)
		}
	}
	f.mu.Unlock()
	f.releaseBatch(told)
	f.mu.Lock()
	f.writing = 0
	if len(f.queue) == 0 && len(f.removals) == 0 && f.drained != nil {
		close(f.drained)
		f.drained = nil
	}
	f.mu.Unlock()
	return nil
}

func (f *Finisher) retryPostponed() {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, a := range f.postponed {
		a.postponed = false
	}
	f.queue = append(f.queue, f.postponed...)
	f.postponed = nil
}

// writeBatch tries until everything is written, ctx ends or the lease is lost.
func (f *Finisher) writeBatch(ctx context.Context, batch []*decision) error {
	if err := f.retryWrite(ctx, func(ctx context.Context) error { return f.writeOutcomes(ctx, batch) }); err != nil {
		return err
	}
	return f.retryWrite(ctx, func(ctx context.Context) error { return f.moveDead(ctx, batch) })
}

func (f *Finisher) retryWrite(ctx context.Context, op func(context.Context) error) error {
	back := retry.Reopen.Start()
	for {
		err := op(ctx)
		switch {
		case err == nil:
			if f.failing && f.config.Well != nil {
				f.config.Well()
			}
			f.failing = false
			return nil
		case ctx.Err() != nil:
			return context.Cause(ctx)
		case errors.Is(err, lease.ErrLeaseLost):
			return err
		}
		f.failing = true
		if f.config.Trouble != nil {
			f.config.Trouble(err)
		}
		if back.Wait(ctx) != nil {
			return context.Cause(ctx)
		}
	}
}

// writeOutcomes writes what the batch leaves on documents, in transactions that end within what is left of the lease: with a slow
// server they become smaller, and stay so for the batches to come until it is quicker again.
func (f *Finisher) writeOutcomes(ctx context.Context, batch []*decision) error {
	for len(batch) > 0 {
		part := batch[:min(len(batch), f.partSize.Most())]
		switch err := store.WriteHalves(part, func(part []*decision) error { return f.writeOutcomePart(ctx, part) }, f.postpone); {
		case errors.Is(err, store.ErrSlow):
			f.partSize.Slow(len(part))
			continue
		case err != nil:
			return err
		}
		f.partSize.Ended()
		batch = batch[len(part):]
	}
	return nil
}

// writeOutcomePart is one transaction.
func (f *Finisher) writeOutcomePart(ctx context.Context, batch []*decision) error {
	list := make([]store.Outcome, 0, len(batch))
	for _, a := range batch {
		if a.outcome == nil {
			continue
		}
		if err := a.outcome.Check(); err != nil {
			return err
		}
		list = append(list, *a.outcome)
	}
	if len(list) == 0 {
		return nil
	}
	var matched int64
	err := store.FencedSoon(ctx, f.config.Fencer, nil, len(list), func(tx context.Context) (err error) {
		matched, err = store.WriteOutcomes(tx, list)
		return err
	})
	if err == nil && matched < int64(len(list)) {
		return f.markGone(ctx, batch)
	}
	return err
}

// postpone keeps a fate for another time.
func (f *Finisher) postpone(a *decision, why error) error {
	f.config.Log.Error("the fate of an envelope cannot be written; its key waits and it is tried again; does a validator of the collection know nothing of exceptions?",
		"collection", a.NS, "error", why)
	a.postponed = true
	return nil
}

// releaseBatch gives free what the deliveries held.
func (f *Finisher) releaseBatch(batch []*decision) {
	tickets := make([]record.Ticket, 0, len(batch))
	var count [endCount]int
	var flights []uint64
	for _, a := range batch {
		if a.hasTicket {
			tickets = append(tickets, a.ticket)
		}
		if a.Flight != 0 {
			flights = append(flights, a.Flight)
		}
		count[a.fate.End]++
	}
	if len(tickets) > 0 {
		f.config.Outlet.Settle(tickets)
	}
	if len(flights) > 0 && f.scheduled != nil {
		f.scheduled.endFlights(flights)
	}
	for _, a := range batch {
		f.openGates(a)
		if a.Done != nil {
			a.Done(a.fate)
		}
		if f.config.Count != nil {
			f.config.Count(a.fate.End, a.fate.Class, 1)
		}
	}
	f.config.Log.Debug("exceptions were written", "finished", count[Finished], "retrying", count[Retrying], "waiting", count[Waiting],
		"dead", count[Dead], "dropped", count[Dropped])
}

// openGates opens the gates that an exception of the stream held, and lets its key go on.
func (f *Finisher) openGates(a *decision) {
	if a.Origin == store.OriginStream && a.Claim == "" {
		for _, topic := range a.gatesToOpen() {
			f.config.Outlet.Open(a.NS, topic, a.Key)
		}
	}
	if a.Latched {
		return
	}
	for _, topics := range [][]string{a.fate.Refused, a.fate.Held} {
		for _, topic := range topics {
			f.config.Outlet.Resume(a.NS, topic, a.Key)
		}
	}
}

// gatesToOpen are the topics for which the envelope is no exception any more. One without a list of targets had one gate, of no
// topic, which opens as soon as there is a list.
func (a *decision) gatesToOpen() []string {
	if a.Pending == nil {
		if a.fate.End == Waiting && a.outcome == nil {
			return nil
		}
		return []string{""}
	}
	if a.fate.End != Retrying && a.fate.End != Waiting {
		return a.Pending
	}
	open := make([]string, 0, len(a.acked))
	for _, s := range a.acked {
		open = append(open, s.Topic)
	}
	return open
}
