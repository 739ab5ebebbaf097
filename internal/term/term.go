// Package term owns one slot of a watcher for one term after the other. A term acquires the lease,
// takes over, reads and delivers, drains, and releases. The package contains the order of a takeover.
//
// It promises:
//
//   - There is one term of ownership at a time.
//   - Nothing is sent before the earlier senders are fenced and the new sender is persisted.
//   - A stop drains, saves a checkpoint and releases the lease, in that order.
//   - Every goroutine of a term has ended before the next term begins (N2).
package term

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"golang.org/x/sync/errgroup"

	"github.com/outrelay/outrelay/internal/activity"
	"github.com/outrelay/outrelay/internal/changestream"
	"github.com/outrelay/outrelay/internal/gap"
	"github.com/outrelay/outrelay/internal/lease"
	"github.com/outrelay/outrelay/internal/ledger"
	"github.com/outrelay/outrelay/internal/mailbox"
	"github.com/outrelay/outrelay/internal/nodes"
	"github.com/outrelay/outrelay/internal/pipeline"
	"github.com/outrelay/outrelay/internal/readiness"
	"github.com/outrelay/outrelay/internal/sink"
	"github.com/outrelay/outrelay/internal/state"
	"github.com/outrelay/outrelay/internal/waiting"
	"github.com/outrelay/outrelay/internal/watched"
	"github.com/outrelay/outrelay/resume"
)

var (
	// errStopping ends the reading of a term. The term is drained next.
	errStopping = errors.New("stopping")
	// errReadEnded ends the monitor after the reading has ended for another reason.
	errReadEnded = errors.New("reading ended")
)

// errGapTooLate ends a term that has found a gap after it has loaded the waiting envelopes. The next takeover
// finds the gap in the document.
var errGapTooLate = errors.New("the change stream has a gap that contains waiting envelopes")

// term is one period of ownership: from the acquisition of the lease to its release or loss.
type term struct {
	slot *Runner
	held *lease.Held
	log  *slog.Logger

	// inBackground starts a goroutine with a context that ends with the term. These goroutines are
	// joined last, after the release of the lease.
	inBackground func(func(context.Context))

	calls       *readiness.Calls
	journal     *journal
	collections *watched.Collections
	schedules   *watched.Schedules
	indexes     *indexKeeper
	start       *startPoint
	recovery    *gap.Recovery
	store       *waiting.Store
	letters     *mongo.Collection
	entered     *mailbox.Box[*waiting.Entry] // envelopes that were stored as waiting
	ready       *mailbox.Box[string]         // topics that can be written again
	ledger      *ledger.Ledger
	stats       *termStats
	activity    *activity.Log
	dispatcher  *pipeline.Dispatcher
	stream      *changestream.Stream

	acked      atomic.Int64 // records acked by Kafka
	delivering atomic.Bool  // set when the takeover is done

	// Set during the takeover.
	stampMargin time.Duration // by which server timestamps may be older than the commit of their envelopes
	sink        *sink.Sink
	reconciler  *reconcilers
	pump        *pipeline.Pump
}

// newTerm returns a term of the slot. It does no I/O.
func (r *Runner) newTerm(held *lease.Held, inBackground func(func(context.Context))) (*term, error) {
	doc := held.Document()
	log := r.log.With("epoch", doc.Epoch)
	t := &term{slot: r, held: held, log: log, inBackground: inBackground, stats: newTermStats(), activity: activity.New(r.shared.Clock.Now)}
	var err error
	if t.stream, err = t.newStream(); err != nil {
		return nil, err
	}
	t.slot.metrics.StreamStuck.SetSource(func() float64 { return t.stream.Stuck().Seconds() })

	clients := r.shared.Mongo
	db := state.Open(clients.State, r.cfg.State)
	t.calls = &readiness.Calls{Client: clients.Stream, State: r.State, Timeout: r.shared.Pace.Call}
	t.store = waiting.NewStore(db.Collection("waiting"), r.cfg.Watcher, r.Slot)
	t.letters = db.Collection("letters")
	t.entered, t.ready = mailbox.New[*waiting.Entry](), mailbox.New[string]()
	t.ledger = t.newLedger()
	t.dispatcher = t.newDispatcher()
	t.journal = &journal{events: r.events, held: held, slot: r.Slot, log: log, inBackground: inBackground}
	t.collections = &watched.Collections{
		Calls:    t.calls,
		Client:   clients.State,
		Registry: r.shared.Registry,
		Scope:    r.scope,
		Watch:    r.cfg.Watch,
		Watcher:  r.cfg.Watcher,
		Slot:     r.Slot,
		Log:      log,
		Claimed:  map[[16]byte]bool{},
	}
	t.indexes = &indexKeeper{
		client:       clients.State,
		cfg:          &r.cfg,
		collections:  t.collections,
		pause:        r.shared.Pace.Indexes,
		log:          log,
		inBackground: inBackground,
	}
	t.schedules = &watched.Schedules{
		Coll:    db.Collection("schedules"),
		Client:  clients.State,
		Watcher: r.cfg.Watcher,
		Slot:    r.Slot,
		Calls:   t.calls,
		Log:     log,
		Prepare: t.indexes.ensureScheduled,
	}
	t.recovery = &gap.Recovery{
		Config:      &r.cfg,
		Scope:       r.scope,
		Held:        held,
		Calls:       t.calls,
		Collections: t.collections,
		Schedules:   t.schedules,
		Dispatcher:  t.dispatcher,
		Metrics:     r.metrics,
		Now:         r.shared.Clock.Now,
		Log:         log,
		AppendEvent: t.journal.appendEvent,
		OnClosed: func(end resume.Position) {
			t.start.setStart(end)
			t.pump.DrainedSlots = nil
		},
		Discard: func(ctx context.Context, db, coll, before string) (int64, error) {
			return t.reconciler.sender.Discard(ctx, held, db, coll, before)
		},
	}
	t.start = &startPoint{
		slot:        r,
		held:        held,
		calls:       t.calls,
		collections: t.collections,
		recovery:    t.recovery,
		dispatcher:  t.dispatcher,
	}
	return t, nil
}

// serveTerm runs one term. It returns nil when stop ended the term. It returns only after every
// goroutine of the term has ended (N2).
func (r *Runner) serveTerm(stop, work context.Context, held *lease.Held) error {
	work, cancel := context.WithCancelCause(work)
	defer cancel(nil)
	g, work := errgroup.WithContext(work)
	var background sync.WaitGroup
	t, err := r.newTerm(held, func(f func(context.Context)) { background.Go(func() { f(work) }) })
	if err != nil {
		return err
	}
	r.metrics.LeaseOwner.Set(1)
	held.SetSource(t.currentCheckpoint)

	// The lease is renewed during the whole takeover (N1).
	renew, stopRenewing := context.WithCancel(work)
	defer stopRenewing()
	g.Go(func() error { return ignoreStop(renew, held.Run(renew)) })

	r.State.SetHung(false)
	err = t.runTerm(stop, work, g, stopRenewing)

	// If a stage ended the term, the error of runTerm is only its consequence.
	if cause := context.Cause(work); cause != nil && !errors.Is(cause, context.Canceled) {
		err = cause
	}

	r.current.Store(nil)
	if !errors.Is(err, lease.ErrLeaseLost) {
		// A release that fails means that the lease may have expired before. Then a new owner
		// fences this process in Kafka, which is no failure.
		if e := t.releaseLease(work, err); e != nil && errors.Is(err, sink.ErrFenced) {
			err = e
		}
	}

	cancel(nil)
	if e := g.Wait(); err == nil && e != nil {
		err = e
	}
	background.Wait()

	// Until its goroutines have ended, the term uses memory of the shared budget.
	t.dispatcher.LeavePool()
	r.State.ClearProblems(termParts...)
	r.setBlockedGauges(nil)
	r.metrics.LeaseOwner.Set(0)
	return err
}

// termParts are the parts of the state that a term reports problems of.
var termParts = []string{"kafka", "stream", "mongodb", "ledger", "stuck", "standstill", "reconciler", "scheduled", "transactions"}

// ignoreStop returns nil if a stage returned err because ctx ended, and err otherwise.
func ignoreStop(ctx context.Context, err error) error {
	if ctx.Err() != nil && (errors.Is(err, context.Canceled) || errors.Is(err, context.Cause(ctx))) {
		return nil
	}
	return err
}

// runTerm takes over, then reads and delivers until stop ends, an operator requests the lease, or a
// stage fails. It drains before it returns.
func (t *term) runTerm(stop, work context.Context, g *errgroup.Group, stopRenewing func()) error {
	read, stopRead := context.WithCancelCause(work)
	defer stopRead(nil)
	defer context.AfterFunc(stop, func() { stopRead(errStopping) })()

	m := &monitor{
		slot:         t.slot,
		held:         t.held,
		calls:        t.calls,
		stream:       t.stream,
		dispatcher:   t.dispatcher,
		recovery:     t.recovery,
		start:        t.start,
		journal:      t.journal,
		stats:        t.stats,
		log:          t.log,
		acked:        &t.acked,
		delivering:   &t.delivering,
		targets:      func() []sink.Blocked { return t.sink.State() },
		stopRenewing: stopRenewing,
	}
	var watching sync.WaitGroup
	watching.Go(func() { m.watchTerm(read, stopRead) })

	t.slot.State.SetRole(readiness.RoleTakeOver)
	start, err := t.takeOver(read, work, g)
	if err == nil {
		t.slot.State.SetRole(readiness.RoleOwner)
		err = t.readStream(read, start)
	}

	// The monitor ends before haltWithLease reads the channel of Yield. Otherwise the monitor could
	// consume an operator's request.
	stopRead(errReadEnded)
	watching.Wait()
	cause := context.Cause(read)
	if work.Err() != nil {
		return context.Cause(work)
	}

	if errors.Is(cause, errStopping) {
		t.slot.State.SetRole(readiness.RoleStopping)
	}
	t.drainStream(work)
	t.drainReconciler(work)

	switch {
	case errors.Is(cause, errStopping):
		return nil
	case !errors.Is(cause, errReadEnded):
		return cause
	}
	return t.haltWithLease(stop, work, err)
}

// readStream tails the stream and pumps it until ctx ends or the stream cannot continue.
func (t *term) readStream(ctx context.Context, start changestream.Start) error {
	for {
		err := t.readStreamOnce(ctx, start)
		if start, err = t.recovery.FindNextStart(ctx, err); err != nil {
			return err
		}

		// The stream was expected to repeat the waiting envelopes of the previous owner, for their other
		// topics. It no longer can. That has to be known before these are loaded, so a new
		// takeover finds the gap in the document. Any other gap is swept in this term, because its sweep
		// leaves out the envelopes that an earlier sweep of the term has delivered (gap.Skip).
		if t.recovery.IsGapOpen() && t.pump.Previous != nil {
			return errGapTooLate
		}
	}
}

// readStreamOnce opens the stream at start, sweeps the gap if there is one, and pumps the stream
// until it ends.
func (t *term) readStreamOnce(ctx context.Context, start changestream.Start) error {
	batches := make(chan *changestream.Batch)
	ended := make(chan error, 1)
	inner, cancel := context.WithCancel(ctx)
	defer cancel()
	t.inBackground(func(context.Context) {
		defer close(batches)
		ended <- t.stream.Run(inner, start, batches)
	})

	// The stream is open during the sweep, but held: the reader blocks with its first batch.
	if err := t.recovery.SweepGap(ctx, t.start.from); err != nil {
		return err
	}

	// After an error the reader is not awaited, and it delivers nothing more. A server may answer
	// its last request only at the next write, and the lease must be released before. serveTerm
	// joins the reader.
	if err := t.pump.Run(ctx, batches); err != nil {
		return err
	}
	return <-ended
}

// drainStream waits until all events that were read are acked or stored. It gives up
// after the configured time, or when only blocked targets are left. The next owner reads the rest
// back.
func (t *term) drainStream(work context.Context) {
	if t.sink == nil {
		return
	}

	ctx, cancel := context.WithTimeout(work, t.slot.cfg.Lease.Drain)
	defer cancel()

	// One long drain would wait for a blocked target until its end. Between short drains, the acks show
	// whether other targets still make progress.
	for acked := int64(-1); t.drainBriefly(ctx) != nil; {
		if ctx.Err() != nil || acked == t.acked.Load() && t.hasBlockedTargets() {
			n, _ := t.dispatcher.Unresolved()
			t.log.Warn("stopping with undelivered events; the next owner delivers them", "unresolved", n)
			break
		}
		acked = t.acked.Load()
	}

	if err := t.recovery.SaveCursor(ctx); err != nil {
		t.log.Warn("cannot save the cursor of the sweep; the next owner repeats a part of it", "reason", err)
	}
}

// drainCheckEvery is the interval at which a drain checks whether records are still acked.
const drainCheckEvery = 250 * time.Millisecond

// drainBriefly drains for at most [drainCheckEvery]. It returns nil when the dispatcher is drained.
func (t *term) drainBriefly(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, drainCheckEvery)
	defer cancel()
	return t.dispatcher.Drain(ctx)
}

// hasBlockedTargets reports whether envelopes wait for a target that cannot be written and is not
// parked.
func (t *term) hasBlockedTargets() bool {
	return slices.ContainsFunc(t.sink.State(), func(b sink.Blocked) bool { return b.Records > 0 && !b.Parked })
}

// releaseLease saves the last checkpoint and releases the lease. Its success proves that this
// process held the lease until then.
func (t *term) releaseLease(work context.Context, why error) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(work), t.slot.cfg.Lease.TTL)
	defer cancel()
	if err := t.held.Release(ctx); err != nil {
		t.log.Warn("cannot release the lease; it expires", "reason", err, "ttl", t.slot.cfg.Lease.TTL)
		return err
	}

	t.journal.announceReleased(work, why)
	return nil
}

// haltWithLease keeps the lease if err is a *HaltError, so that no standby runs into the same
// problem. It blocks until stop ends, the lease is lost, or an operator requests the lease. It
// returns any other err at once.
func (t *term) haltWithLease(stop, work context.Context, err error) error {
	halt, ok := errors.AsType[*readiness.HaltError](err)
	if !ok {
		return err
	}

	t.slot.State.SetRole(readiness.RoleHalted)
	t.slot.State.ReportProblem("halted", halt, true)
	t.stats.setHalted(halt.Error())
	t.journal.appendEvent(work, nodes.Halted, bson.D{{Key: "reason", Value: halt.Error()}})
	defer t.slot.State.ClearProblems("halted")

	select {
	case <-stop.Done():
		return nil
	case <-work.Done():
		return context.Cause(work)
	case reason := <-t.held.Yield():
		return fmt.Errorf("%w: %s", errStepDown, reason)
	}
}

// currentCheckpoint returns the checkpoint that the next renewal saves.
func (t *term) currentCheckpoint() lease.Checkpoint {
	c := lease.Checkpoint{Stats: t.stats.report()}
	// During the takeover no offset may move: recoverUnrecorded relies on the stored offsets. During a
	// sweep, the sweep determines the positions.
	if !t.delivering.Load() || t.recovery.IsSweeping() {
		return c
	}

	// While a gap is open the position stays before it (N22). A sweep may have begun since the
	// check above.
	pos, ok, offsets := t.dispatcher.Snapshot()
	if ok && !t.recovery.IsSweeping() {
		c.Position = pos
		c.Offsets = offsets
	}
	return c
}

var _ pipeline.Sink = (*sink.Sink)(nil)
