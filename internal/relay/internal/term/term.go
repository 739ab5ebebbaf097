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
	"sync"
	"sync/atomic"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"golang.org/x/sync/errgroup"

	"github.com/outrelay/outrelay/internal/base/mailbox"
	"github.com/outrelay/outrelay/internal/relay/internal/changestream"
	"github.com/outrelay/outrelay/internal/relay/internal/gap"
	"github.com/outrelay/outrelay/internal/relay/internal/ledger"
	"github.com/outrelay/outrelay/internal/relay/internal/pipeline"
	"github.com/outrelay/outrelay/internal/relay/internal/sink"
	"github.com/outrelay/outrelay/internal/relay/internal/watched"
	"github.com/outrelay/outrelay/internal/relay/readiness"
	"github.com/outrelay/outrelay/internal/relay/stored/lease"
	"github.com/outrelay/outrelay/internal/relay/stored/nodes"
	"github.com/outrelay/outrelay/internal/relay/stored/state"
	"github.com/outrelay/outrelay/internal/relay/stored/waiting"
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

// term is one period of ownership: from the acquisition of the lease to its release or loss. It has the parts that exist during
// the takeover. Its [delivery] has the others.
type term struct {
	*sources
	*results
	progress *progress
	start    *startPoint
}

// sources are the parts with which a term reads.
type sources struct {
	slot *Runner
	held *lease.Held
	log  *slog.Logger

	// inBackground starts a goroutine with a context that ends with the term. These goroutines are
	// joined last, after the release of the lease.
	inBackground func(func(context.Context))

	calls       *readiness.Calls
	journal     *journal
	collections *watched.Collections
	indexes     *indexKeeper
	schedules   *watched.Schedules
	stream      *changestream.Stream
	plan        *gap.Plan
}

// results are the parts that take what becomes of the events: the resolver passes outcomes to the queue of the ledger, which stores
// them.
type results struct {
	*stores
	meter    *meter
	ready    *mailbox.Box[string] // topics that can be written again
	resolver *pipeline.Resolver
	ledger   *ledger.Ledger
}

// stores have the envelopes that were not sent at once.
type stores struct {
	store   *waiting.Store
	letters *mongo.Collection
	claims  *mongo.Collection
	entered *mailbox.Box[*waiting.Entry] // envelopes that were stored as waiting
}

// newTerm returns a term of the slot. It does no I/O.
func (r *Runner) newTerm(held *lease.Held, inBackground func(func(context.Context))) (*term, error) {
	from, err := r.newSources(held, inBackground)
	if err != nil {
		return nil, err
	}
	to := newResults(from)
	progress := &progress{stats: newTermStats(), plan: from.plan, resolver: to.resolver}
	start := &startPoint{
		slot:        r,
		held:        held,
		calls:       from.calls,
		collections: from.collections,
		plan:        from.plan,
		resolver:    to.resolver,
		progress:    progress,
	}
	return &term{sources: from, results: to, progress: progress, start: start}, nil
}

// newSources returns the sources of a term.
func (r *Runner) newSources(held *lease.Held, inBackground func(func(context.Context))) (*sources, error) {
	acquired := held.Document()
	log := r.log.With("epoch", acquired.Epoch)
	stream, err := r.newStream(log, listSkips(&acquired, log))
	if err != nil {
		return nil, err
	}

	clients := r.shared.Mongo
	calls := &readiness.Calls{Client: clients.Stream, State: r.State, Timeout: r.shared.Pace.Call}
	journal := &journal{events: r.events, held: held, slot: r.Slot, log: log, inBackground: inBackground}
	collections := &watched.Collections{
		Calls:    calls,
		Client:   clients.State,
		Registry: r.shared.Registry,
		Scope:    r.scope,
		Watch:    r.cfg.Watch,
		Watcher:  r.cfg.Watcher,
		Slot:     r.Slot,
		Log:      log,
		Claimed:  map[[16]byte]bool{},
	}
	indexes := &indexKeeper{
		client:       clients.State,
		cfg:          &r.cfg,
		collections:  collections,
		pause:        r.shared.Pace.Indexes,
		log:          log,
		inBackground: inBackground,
	}

	return &sources{
		slot:         r,
		held:         held,
		log:          log,
		inBackground: inBackground,
		calls:        calls,
		journal:      journal,
		collections:  collections,
		indexes:      indexes,
		schedules: &watched.Schedules{
			Coll:    state.Open(clients.State, r.cfg.State).Collection("schedules"),
			Client:  clients.State,
			Watcher: r.cfg.Watcher,
			Slot:    r.Slot,
			Calls:   calls,
			Log:     log,
			Prepare: indexes.ensureScheduled,
		},
		stream: stream,
		plan: &gap.Plan{
			Config:      &r.cfg,
			Held:        held,
			Calls:       calls,
			Collections: collections,
			Now:         r.shared.Clock.Now,
			Log:         log,
			AppendEvent: journal.appendEvent,
		},
	}, nil
}

// newResults returns the results of a term that reads from inputs. The queue is the first of them, because the resolver fills it and the
// ledger reads positions from the resolver.
func newResults(inputs *sources) *results {
	runner := inputs.slot
	db := state.Open(runner.shared.Mongo.State, runner.cfg.State)
	kept := &stores{
		store:   waiting.NewStore(db.Collection("waiting"), runner.cfg.Watcher, runner.Slot),
		letters: db.Collection("letters"),
		claims:  db.Collection(waiting.ClaimsName),
		entered: mailbox.New[*waiting.Entry](),
	}

	meter, ready, queue := newMeter(runner.shared, runner.metrics), mailbox.New[string](), ledger.NewQueue()
	resolver := pipeline.NewResolver(pipeline.Config{
		Pool:    runner.shared.Pool,
		Ledger:  queue,
		Ready:   ready,
		Recycle: runner.sinks.Recycle,
		Now:     runner.shared.Clock.Now,
		Metrics: pipeline.Metrics{Acked: meter.observeAcked, Dead: meter.observeDead, Held: meter.observeHeld},
	})
	ledger := newLedger(inputs, kept, queue, meter, &images{sources: inputs, resolver: resolver})
	return &results{stores: kept, meter: meter, ready: ready, resolver: resolver, ledger: ledger}
}

// serveTerm runs one term. It returns nil when stop ended the term. It returns only after every
// goroutine of the term has ended (N2).
func (r *Runner) serveTerm(stop, work context.Context, held *lease.Held) error {
	work, cancel := context.WithCancelCause(work)
	defer cancel(nil)
	group, work := errgroup.WithContext(work)
	var background sync.WaitGroup
	term, err := r.newTerm(held, func(task func(context.Context)) { background.Go(func() { task(work) }) })
	if err != nil {
		return err
	}
	r.metrics.LeaseOwner.Set(1)

	// The lease is renewed during the whole takeover (N1).
	renew, stopRenewing := context.WithCancel(work)
	defer stopRenewing()
	group.Go(func() error { return ignoreStop(renew, held.Run(renew, term.progress.checkpoint)) })

	r.State.SetHung(false)
	err = term.runTerm(stop, work, group, stopRenewing)

	// If a stage ended the term, the error of runTerm is only its consequence.
	if cause := context.Cause(work); cause != nil && !errors.Is(cause, context.Canceled) {
		err = cause
	}

	r.current.Store(nil)
	if !errors.Is(err, lease.ErrLeaseLost) {
		// A release that fails means that the lease may have expired before. Then a new owner
		// fences this process in Kafka, which is no failure.
		if cause := term.releaseLease(work, err); cause != nil && errors.Is(err, sink.ErrFenced) {
			err = cause
		}
	}

	cancel(nil)
	if cause := group.Wait(); err == nil && cause != nil {
		err = cause
	}
	background.Wait()

	// Until its goroutines have ended, the term uses memory of the shared budget.
	term.resolver.LeavePool()
	// The heartbeat of the process reports these two. All other problems belonged to the term.
	r.State.KeepProblems("mongodb reachable", "kafka reachable")
	r.setUnwritableGauges(nil)
	r.metrics.LeaseOwner.Set(0)
	return err
}

// ignoreStop returns nil if a stage returned err because ctx ended, and err otherwise.
func ignoreStop(ctx context.Context, err error) error {
	if ctx.Err() != nil && (errors.Is(err, context.Canceled) || errors.Is(err, context.Cause(ctx))) {
		return nil
	}
	return err
}

// runTerm takes over, then reads and delivers until stop ends, an operator requests the lease, or a
// stage fails. It drains before it returns.
func (t *term) runTerm(stop, work context.Context, group *errgroup.Group, stopRenewing func()) error {
	read, stopRead := context.WithCancelCause(work)
	defer stopRead(nil)
	defer context.AfterFunc(stop, func() { stopRead(errStopping) })()

	monitor := &monitor{
		slot:         t.slot,
		held:         t.held,
		calls:        t.calls,
		stream:       t.stream,
		resolver:     t.resolver,
		plan:         t.plan,
		start:        t.start,
		journal:      t.journal,
		progress:     t.progress,
		meter:        t.meter,
		log:          t.log,
		stopRenewing: stopRenewing,
	}
	var watching sync.WaitGroup
	begun := make(chan *sink.Sink, 1)
	watching.Go(func() { monitor.watchTerm(read, begun, stopRead) })

	t.slot.State.SetPhase(readiness.PhaseTakeOver)
	var publishing *publishing
	delivery, start, err := t.takeOver(read)
	if err == nil {
		publishing = delivery.begin(read, work, group)
		begun <- delivery.sink
		t.slot.State.SetPhase(readiness.PhaseOwner)
		err = delivery.readStream(read, start)
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
		t.slot.State.SetPhase(readiness.PhaseStopping)
	}
	// Without a takeover, nothing was sent.
	if publishing != nil {
		delivery.drainStream(work)
		delivery.drainSides(work, publishing)
	}

	switch {
	case errors.Is(cause, errStopping):
		return nil
	case !errors.Is(cause, errReadEnded):
		return cause
	}
	return t.haltWithLease(stop, work, err)
}

// releaseLease saves the last checkpoint and releases the lease. Its success proves that this
// process held the lease until then.
func (t *term) releaseLease(work context.Context, why error) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(work), t.slot.cfg.Lease.TTL)
	defer cancel()
	t.start.saveDescription(ctx)
	if err := t.held.Release(ctx, t.progress.checkpoint); err != nil {
		t.log.Warn("cannot release the lease; a standby waits until it expires", "error", err, "ttl", t.slot.cfg.Lease.TTL)
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

	t.slot.State.SetPhase(readiness.PhaseHalted)
	t.slot.State.ReportFatalProblem("halted", halt)
	t.progress.stats.setHalted(halt.Error())
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

// progress is how far a term has come.
type progress struct {
	stats    *termStats
	plan     *gap.Plan
	resolver *pipeline.Resolver

	delivering atomic.Bool // set when the takeover is done
	// undescribed is set while the watcher document describes the stream of an earlier configuration.
	undescribed atomic.Bool
}

// checkpoint returns the checkpoint that the next renewal saves. A position of a stream that the document does not describe is saved
// with the description. A later owner would conclude from the position alone that the stream had included other collections (N27).
func (p *progress) checkpoint() lease.Checkpoint {
	if p.undescribed.Load() {
		return lease.Checkpoint{Stats: p.stats.report()}
	}
	return p.checkpointOfStream()
}

// checkpointOfStream returns the checkpoint that is saved with the description of the stream.
func (p *progress) checkpointOfStream() lease.Checkpoint {
	checkpoint := lease.Checkpoint{Stats: p.stats.report()}
	// During the takeover no offset may move: finishSent relies on the stored offsets. During a
	// sweep, the sweep determines the positions.
	if !p.delivering.Load() || p.plan.IsSweeping() {
		return checkpoint
	}

	// While a gap is open the position stays before it (N22). A sweep may have begun since the
	// check above.
	pos, ok, offsets := p.resolver.Snapshot()
	if ok && !p.plan.IsSweeping() {
		checkpoint.Position = pos
		checkpoint.Offsets = offsets
	}
	return checkpoint
}
