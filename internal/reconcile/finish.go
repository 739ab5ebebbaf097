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
	ends
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

// answered is a delivery whose fate is decided.
type answered struct {
	*Delivery
	fate    Fate
	ticket  record.Ticket
	settle  bool // there is a ticket
	acked   []store.SentTo
	outcome *store.Outcome // what to write, nil for nothing or for a letter
	letter  *letter        // to move, nil for none
	buried  bool           // it was moved
	aside   bool           // the server does not take it
}

// letter is why a delivery is dead.
type letter struct {
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
	c Finishing

	mu      sync.Mutex
	queue   []*answered
	spent   spentList
	waiting time.Time     // since when those of spent give way; zero if they do not
	busy    int           // taken from the queues, not told yet
	table   timetable     // of the scheduled ones; nil if there are none
	wake    chan struct{} // holds one token
	drained chan struct{} // closed when nothing is left; nil while nobody waits
	aside   []*answered   // what the server did not take, for another time
	seq     uint32
	trouble bool
	size    *store.PartSize // deliveries in one transaction
}

// asideFor is how long what the server does not take waits for the next try.
const asideFor = 5 * time.Second

// NewFinisher makes a Finisher. It writes nothing until Run.
func NewFinisher(c Finishing) *Finisher {
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	return &Finisher{c: c, wake: make(chan struct{}, 1), size: store.NewPartSize(store.MaxExceptions)}
}

// Answered takes over a delivery with all of its answers. It does not block.
func (f *Finisher) Answered(d *Delivery, p record.Published) {
	if f.done(d, p.Answers) {
		f.mu.Lock()
		f.spent.add(spent{ns: d.NS, id: d.ID, flight: d.Flight, ticket: p.Ticket, number: d.Number})
		f.mu.Unlock()
		f.poke()
		return
	}
	a := &answered{Delivery: d, ticket: p.Ticket, settle: true}
	f.decide(a, p.Answers)
	f.push(a)
}

// Refused takes over a delivery that was not published, because it is at fault itself. It does not block.
func (f *Finisher) Refused(d *Delivery, why *record.Refusal) {
	a := &answered{Delivery: d}
	if why.Class == record.Expired && f.c.DropExpired {
		a.fate = Fate{End: Dropped, Class: why.Class, Left: d.Pending, Refused: d.Pending}
		a.outcome = a.result(store.FateDropped)
	} else {
		f.refused(a, why, d.Pending, d.Pending, record.Answer{Partition: record.AnyPartition})
	}
	f.push(a)
}

func (f *Finisher) push(a *answered) {
	f.mu.Lock()
	f.queue = append(f.queue, a)
	f.mu.Unlock()
	f.poke()
}

func (f *Finisher) poke() {
	select {
	case f.wake <- struct{}{}:
	default:
	}
}

// Run writes until ctx ends or the lease is lost, and returns the cause.
func (f *Finisher) Run(ctx context.Context) error {
	again := time.NewTicker(asideFor)
	defer again.Stop()
	for {
		next, wait := f.tidying()
		batch := f.take(next && !wait)
		if len(batch) > 0 {
			if err := f.finish(ctx, batch); err != nil {
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
			f.retryAside()
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// take is what the next transaction gets, in the order in which it was answered; tidy says that it may be what was sent.
func (f *Finisher) take(tidy bool) []*answered {
	f.mu.Lock()
	defer f.mu.Unlock()
	var batch []*answered
	if n := min(len(f.queue), store.MaxExceptions); n > 0 || !tidy {
		batch = f.queue[:n:n]
		if f.queue = f.queue[n:]; len(f.queue) == 0 {
			f.queue = nil
		}
	} else {
		batch = f.unspent()
	}
	f.busy = len(batch)
	return batch
}

// Drain waits until everything that was answered is written, except for what the server does not take. It needs Run to be
// under way.
func (f *Finisher) Drain(ctx context.Context) error {
	for {
		f.mu.Lock()
		if len(f.queue) == 0 && len(f.spent) == 0 && f.busy == 0 {
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

// finish makes the fate of a batch durable, then tells of it.
func (f *Finisher) finish(ctx context.Context, batch []*answered) error {
	if err := f.write(ctx, batch); err != nil {
		return err
	}
	told := batch[:0]
	f.mu.Lock()
	for _, a := range batch {
		if a.aside {
			f.aside = append(f.aside, a)
		} else {
			told = append(told, a)
		}
	}
	f.mu.Unlock()
	f.tell(told)
	f.mu.Lock()
	f.busy = 0
	if len(f.queue) == 0 && len(f.spent) == 0 && f.drained != nil {
		close(f.drained)
		f.drained = nil
	}
	f.mu.Unlock()
	return nil
}

func (f *Finisher) retryAside() {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, a := range f.aside {
		a.aside = false
	}
	f.queue = append(f.queue, f.aside...)
	f.aside = nil
}

// write tries until everything is written, ctx ends or the lease is lost.
func (f *Finisher) write(ctx context.Context, batch []*answered) error {
	if err := f.patiently(ctx, func(ctx context.Context) error { return f.outcomes(ctx, batch) }); err != nil {
		return err
	}
	return f.patiently(ctx, func(ctx context.Context) error { return f.letters(ctx, batch) })
}

func (f *Finisher) patiently(ctx context.Context, op func(context.Context) error) error {
	back := retry.Reopen.Start()
	for {
		err := op(ctx)
		switch {
		case err == nil:
			if f.trouble && f.c.Well != nil {
				f.c.Well()
			}
			f.trouble = false
			return nil
		case ctx.Err() != nil:
			return context.Cause(ctx)
		case errors.Is(err, lease.ErrLeaseLost):
			return err
		}
		f.trouble = true
		if f.c.Trouble != nil {
			f.c.Trouble(err)
		}
		if back.Wait(ctx) != nil {
			return context.Cause(ctx)
		}
	}
}

// outcomes writes what the batch leaves on documents, in transactions that end within what is left of the lease: with a slow
// server they become smaller, and stay so for the batches to come until it is quicker again.
func (f *Finisher) outcomes(ctx context.Context, batch []*answered) error {
	for len(batch) > 0 {
		part := batch[:min(len(batch), f.size.Most())]
		switch err := store.WriteHalves(part, func(part []*answered) error { return f.outcomesOf(ctx, part) }, f.setAside); {
		case errors.Is(err, store.ErrSlow):
			f.size.Slow(len(part))
			continue
		case err != nil:
			return err
		}
		f.size.Ended()
		batch = batch[len(part):]
	}
	return nil
}

// outcomesOf is one transaction.
func (f *Finisher) outcomesOf(ctx context.Context, batch []*answered) error {
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
	err := store.FencedSoon(ctx, f.c.Fencer, nil, len(list), func(tx context.Context) (err error) {
		matched, err = store.WriteOutcomes(tx, list)
		return err
	})
	if err == nil && matched < int64(len(list)) {
		return f.missed(ctx, batch)
	}
	return err
}

// setAside keeps a fate for another time.
func (f *Finisher) setAside(a *answered, why error) error {
	f.c.Log.Error("the fate of an envelope cannot be written; its key waits and it is tried again; does a validator of the collection know nothing of exceptions?",
		"collection", a.NS, "error", why)
	a.aside = true
	return nil
}

// tell gives free what the deliveries held.
func (f *Finisher) tell(batch []*answered) {
	tickets := make([]record.Ticket, 0, len(batch))
	var count [ends]int
	var flights []uint64
	for _, a := range batch {
		if a.settle {
			tickets = append(tickets, a.ticket)
		}
		if a.Flight != 0 {
			flights = append(flights, a.Flight)
		}
		count[a.fate.End]++
	}
	if len(tickets) > 0 {
		f.c.Outlet.Settle(tickets)
	}
	if len(flights) > 0 && f.table != nil {
		f.table.landed(flights)
	}
	for _, a := range batch {
		f.release(a)
		if a.Done != nil {
			a.Done(a.fate)
		}
		if f.c.Count != nil {
			f.c.Count(a.fate.End, a.fate.Class, 1)
		}
	}
	f.c.Log.Debug("exceptions were written", "finished", count[Finished], "retrying", count[Retrying], "waiting", count[Waiting],
		"dead", count[Dead], "dropped", count[Dropped])
}

// release opens the gates that an exception of the stream held, and lets its key go on.
func (f *Finisher) release(a *answered) {
	if a.Origin == store.OriginStream && a.Claim == "" {
		for _, topic := range a.gates() {
			f.c.Outlet.Open(a.NS, topic, a.Key)
		}
	}
	if a.Latched {
		return
	}
	for _, topics := range [][]string{a.fate.Refused, a.fate.Held} {
		for _, topic := range topics {
			f.c.Outlet.Resume(a.NS, topic, a.Key)
		}
	}
}

// gates are the topics for which the envelope is no exception any more. One without a list of targets had one gate, of no
// topic, which opens as soon as there is a list.
func (a *answered) gates() []string {
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
