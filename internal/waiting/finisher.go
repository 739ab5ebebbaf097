package waiting

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"sync"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/deadletter"
	"github.com/outrelay/outrelay/internal/envelope"
	"github.com/outrelay/outrelay/internal/lease"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/outboxes"
	"github.com/outrelay/outrelay/internal/record"
	"github.com/outrelay/outrelay/internal/retry"
)

// Outlet publishes envelopes outside of the order of the stream: retried, held, scheduled and replayed
// ones.
type Outlet interface {
	// Publish passes one envelope to the sink, for the given topics, or for all topics that it routes
	// to if topics is nil. It may block for room in the reconciler's share of the memory, and flushes
	// the sink before it does. A [*record.Refusal] means that the envelope is at fault. After any other
	// error nothing was sent. After nil, answer is called exactly once, when each target has its
	// answer. That may happen within Publish, and answer does not block. The sink uses e during the
	// call only.
	Publish(ctx context.Context, e *outboxes.Envelope, topics []string, answer func(record.Published)) error
	// Settle is called when the fates of these deliveries are majority-committed (N8): exactly once for
	// each delivery that was answered, unless the lease was lost before.
	Settle(tickets []record.Ticket)
	// OpenGate removes one exception from the gate of a key (N15): an exception of the stream is finished
	// or dead for that topic.
	OpenGate(ns, topic, key string)
	// Reached returns the position of the watermark. The stream brings no more events at or before it.
	Reached() string
	// ResumeKey continues deliveries of a key after one of them was refused or returned. It has no effect
	// if none wait.
	ResumeKey(ns, topic, key string)
	// Flush wakes the sink after a series of Publish calls.
	Flush()
}

// Delivery is one envelope that is published outside of the order of the stream, with the data that is
// needed until its fate is written. It must not alias a reply.
type Delivery struct {
	NS      string
	ID      bson.RawValue
	Number  int32    // its field `delivery`
	Key     string   // canonical text of the ordering key
	Pos     string   // with Claim, its position as an exception; defaults to one made of the current time
	Origin  string   // as stored
	Claim   string   // token of the claim of a scheduled envelope (N19)
	Pending []string // targets that do not have it yet; nil: all that it routes to
	// Attempts is the number of earlier attempts that failed.
	Attempts int32
	// CallerResumes leaves calls of ResumeKey to the caller, which detects when all of the key has returned.
	CallerResumes bool
	// Done is called once with the fate, after it is majority-committed, on the goroutine of the
	// Finisher. It does not block and must not publish. May be nil.
	Done func(Fate)
}

// Fate is the result of a delivery.
type Fate struct {
	End     End
	Refused []string     // topics that refused it
	Held    []string     // topics that returned it or did not accept it
	Class   record.Class // of a dead or failed envelope
}

// End is the kind of a Fate.
type End uint8

// The kinds of a Fate.
const (
	Finished End = iota // each target has it
	Retrying            // it failed, and waits for its next attempt
	Waiting             // it waits as before
	Dead                // it is a dead letter
	Dropped             // it expired and was discarded, or a rule discards it
	Gone                // it was removed, or became another delivery, while it was in flight
	endCount
)

func (e End) String() string {
	return [...]string{"finished", "retrying", "waiting", "dead", "dropped", "gone"}[e]
}

// Shared has the parts and settings that the Finisher of a term shares with the loops that publish.
type Shared struct {
	Client  *mongo.Client // for reads; Fencer has the client of the transactions
	Fencer  mongodb.Fencer
	Epoch   int64 // of the term
	Outlet  Outlet
	Mapping *envelope.Mapping // reads the documents; nil: they are envelopes of the contract
	Now     func() time.Time  // the time of the server, as this process estimates it
	Log     *slog.Logger
	// OnRetry is called with the error of each read or write that failed and is retried, and OnRecovered after
	// the next one that succeeds.
	OnRetry     func(error)
	OnRecovered func()
}

// FinisherConfig is the configuration of a Finisher.
type FinisherConfig struct {
	Shared
	// Retry is the wait before the next attempt. After MaxAttempts an envelope is dead.
	Retry       retry.Policy
	MaxAttempts int
	Recording   string            // watermark, delete or mark
	DropExpired bool              // discard expired envelopes instead of dead-lettering them
	Source      deadletter.Source // of dead letters
	Seal        []byte            // of the state database, see [outboxes.Registry.Seal]
	// Count is called for each fate that is written.
	Count func(end End, class record.Class)
}

// decision is a delivery whose fate is decided.
type decision struct {
	*Delivery
	fate      Fate
	ticket    record.Ticket
	hasTicket bool

	// What is written about the envelope, unless it is dead.
	changed   bool             // its document has to be changed or removed
	removed   bool             // it is removed
	acked     []outboxes.Place // targets that have it now
	left      []string         // targets that are left; nil: all that it routes to
	heldState string           // the state of a scheduled envelope that has to wait
	postponed bool             // MongoDB rejects the write

	failure    *ExceptionError // of the last attempt, if it failed
	deadReason string          // of a dead letter
	partition  int32           // that refused a dead one
	moved      bool            // to the dead letters
}

// Finisher writes the fates of deliveries outside of the order of the stream. Each write is a fenced
// transaction (N3) of all deliveries that were answered since the previous write, at most
// [mongodb.MaxDocuments]. After the transaction is majority-committed, the Finisher releases their
// offsets (N8), opens their gates (N15) and calls Done. When the lease is lost, it writes nothing more.
//
// Answered, Refused and Drain may be called from any goroutine. Memory is bounded by the deliveries in
// flight.
type Finisher struct {
	config FinisherConfig

	// HasClaimable reports whether scheduled envelopes are due that could be claimed now. nil: there are none.
	HasClaimable func() bool

	mu        sync.Mutex
	queue     []*decision
	removals  []*decision   // scheduled envelopes that only have to be removed
	writing   int           // deliveries of the current write
	wake      chan struct{} // holds one token
	postponed []*decision   // deliveries whose write MongoDB rejects
	seq       uint32
	partSize  *mongodb.PartSize // deliveries in one transaction

	// When removals began to wait for due envelopes; zero if they do not wait. Only Run uses it.
	yieldingSince time.Time
}

// postponeFor is the time between two attempts of writes that MongoDB rejects.
const postponeFor = 5 * time.Second

// NewFinisher returns a Finisher. It writes nothing before Run.
func NewFinisher(c FinisherConfig) *Finisher {
	return &Finisher{config: c, wake: make(chan struct{}, 1), partSize: mongodb.NewPartSize(mongodb.MaxDocuments)}
}

// Answered accepts a delivery with all of its answers. It does not block.
func (f *Finisher) Answered(d *Delivery, p record.Published) {
	a := &decision{Delivery: d, ticket: p.Ticket, hasTicket: true}
	f.decideFate(a, p.Answers)
	f.queueDecision(a)
}

// Refused accepts a delivery that was not published because the envelope is at fault. It does not
// block.
func (f *Finisher) Refused(d *Delivery, why *record.Refusal) {
	a := &decision{Delivery: d}
	if why.Class == record.Dropped || why.Class == record.Expired && f.config.DropExpired {
		a.fate = Fate{End: Dropped, Class: why.Class, Refused: d.Pending}
		a.changed, a.removed = true, true
	} else {
		a.left, a.fate.Refused = d.Pending, d.Pending
		f.decideRefused(a, why, record.Answer{Partition: record.AnyPartition})
	}
	f.queueDecision(a)
}

// queueDecision queues a to be written.
func (f *Finisher) queueDecision(a *decision) {
	f.mu.Lock()
	if a.Claim != "" && a.removed {
		f.removals = append(f.removals, a)
	} else {
		f.queue = append(f.queue, a)
	}
	f.mu.Unlock()

	retry.Signal(f.wake)
}

// Run writes until ctx ends or the lease is lost, and returns the cause.
func (f *Finisher) Run(ctx context.Context) error {
	retryTick := time.NewTicker(postponeFor)
	defer retryTick.Stop()

	for {
		wait := f.removalsYield(time.Now())
		batch := f.nextBatch(!wait)
		if len(batch) > 0 {
			if err := f.writeAndRelease(ctx, batch); err != nil {
				return err
			}
			continue
		}

		// Nothing signals that no envelope is due any more, so this is polled.
		var checkAgain <-chan time.Time
		if wait {
			checkAgain = time.After(5 * time.Millisecond)
		}

		select {
		case <-f.wake:
		case <-checkAgain:
		case <-retryTick.C:
			f.retryPostponed()
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// nextBatch returns the deliveries of the next transaction, in the order of their answers. If the queue
// is empty and removals is set, it returns removals.
func (f *Finisher) nextBatch(removals bool) []*decision {
	f.mu.Lock()
	defer f.mu.Unlock()
	from := &f.queue
	if len(f.queue) == 0 && removals {
		from = &f.removals
	}

	n := min(len(*from), mongodb.MaxDocuments)
	batch := (*from)[:n:n]
	*from = (*from)[n:]
	if len(*from) == 0 {
		// A slice of the rest would keep the whole array in memory.
		*from = nil
	}
	f.writing = n
	return batch
}

// maxRemovalWait is the longest time that removals yield. Without it, a collection that cannot be
// claimed would block them permanently.
const maxRemovalWait = 2 * time.Second

// removalsYield reports whether removals are the next to be written, and have to wait because envelopes are due. A
// removal costs more than all earlier steps, and no other step depends on it.
func (f *Finisher) removalsYield(now time.Time) bool {
	f.mu.Lock()
	next := len(f.queue) == 0 && len(f.removals) > 0
	f.mu.Unlock()
	if !next || f.HasClaimable == nil || !f.HasClaimable() {
		f.yieldingSince = time.Time{}
		return false
	}

	if f.yieldingSince.IsZero() {
		f.yieldingSince = now
	}
	if now.Sub(f.yieldingSince) < maxRemovalWait {
		return true
	}
	// The removals that follow may yield again.
	f.yieldingSince = time.Time{}
	return false
}

// drainPoll is the interval at which Drain checks whether everything is written.
const drainPoll = 5 * time.Millisecond

// Drain blocks until the fates of all answered deliveries are written, except for writes that MongoDB
// rejects. It returns the cause of ctx if ctx ends first. Run must be running.
func (f *Finisher) Drain(ctx context.Context) error {
	for {
		f.mu.Lock()
		done := len(f.queue) == 0 && len(f.removals) == 0 && f.writing == 0
		f.mu.Unlock()
		if done {
			return nil
		}
		if err := retry.Sleep(ctx, drainPoll); err != nil {
			return err
		}
	}
}

// writeAndRelease writes the fates of a batch, and then releases the deliveries. Deliveries whose
// write MongoDB rejects are postponed instead.
func (f *Finisher) writeAndRelease(ctx context.Context, batch []*decision) error {
	if err := f.writeBatch(ctx, batch); err != nil {
		return err
	}

	written := batch[:0]
	f.mu.Lock()
	for _, a := range batch {
		if a.postponed {
			f.postponed = append(f.postponed, a)
		} else {
			written = append(written, a)
		}
	}
	f.mu.Unlock()

	f.releaseBatch(written)

	// Drain waits for the release as well, not only for the write.
	f.mu.Lock()
	f.writing = 0
	f.mu.Unlock()
	return nil
}

// retryPostponed queues the postponed deliveries again.
func (f *Finisher) retryPostponed() {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, a := range f.postponed {
		a.postponed = false
	}
	f.queue = append(f.queue, f.postponed...)
	f.postponed = nil
}

// writeBatch writes the fates of a batch, and retries until it succeeds, ctx ends or the lease is lost.
func (f *Finisher) writeBatch(ctx context.Context, batch []*decision) error {
	err := f.retryWrite(ctx, func(ctx context.Context) error { return f.writeOutcomes(ctx, batch) })
	if err != nil {
		return err
	}
	return f.retryWrite(ctx, func(ctx context.Context) error { return f.moveDead(ctx, batch) })
}

// retryWrite calls op until it succeeds, ctx ends or the lease is lost.
func (f *Finisher) retryWrite(ctx context.Context, op func(context.Context) error) error {
	// There is no last attempt: without a written fate, the stored offset of a delivery cannot move
	// (N8).
	failed := false
	err := retry.Do(ctx, retry.Reopen, func(ctx context.Context) error {
		err := op(ctx)
		if errors.Is(err, lease.ErrLeaseLost) {
			return retry.Permanent(err)
		}
		return err
	}, func(err error, _ time.Duration) {
		failed = true
		f.config.OnRetry(err)
	})

	if err != nil && ctx.Err() != nil {
		return context.Cause(ctx)
	}
	if err == nil && failed {
		f.config.OnRecovered()
	}
	return err
}

// writeOutcomes writes the outcomes of a batch in transactions that end before the lease expires. If
// the server is slow, they become smaller, and stay so for later batches until it is faster again.
func (f *Finisher) writeOutcomes(ctx context.Context, batch []*decision) error {
	write := func(part []*decision) error { return f.writeOutcomePart(ctx, part) }
	return mongodb.InParts(f.partSize, batch, nil, func(part []*decision) error {
		return WriteHalves(part, write, f.postponeWrite)
	})
}

// writeOutcomePart writes outcomes in one transaction.
func (f *Finisher) writeOutcomePart(ctx context.Context, batch []*decision) error {
	list := slices.DeleteFunc(slices.Clone(batch), func(a *decision) bool { return !a.changed })
	if len(list) == 0 {
		return nil
	}

	var matched int64
	err := f.config.Fencer.Fenced(ctx, nil, mongodb.LimitRuns(len(list), func(tx context.Context) (err error) {
		matched, err = f.writeFates(tx, list)
		return err
	}))
	if err != nil {
		return err
	}

	// A repetition after a lost response matches nothing either, so the documents have to be read.
	if matched < int64(len(list)) {
		return f.markGone(ctx, batch)
	}
	return nil
}

// postponeWrite marks a delivery whose write MongoDB rejects to be retried later.
func (f *Finisher) postponeWrite(a *decision, why error) error {
	f.config.Log.Error("cannot write the fate of an envelope; its key is blocked, trying again",
		"collection", a.NS, "error", why,
		"hint", "check whether a validator of the collection forbids fields such as state, pos and pending")
	a.postponed = true
	return nil
}
