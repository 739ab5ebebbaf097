package app

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
	"golang.org/x/sync/errgroup"

	"github.com/outrelay/outrelay/internal/changestream"
	"github.com/outrelay/outrelay/internal/lease"
	"github.com/outrelay/outrelay/internal/nodes"
	"github.com/outrelay/outrelay/internal/outboxes"
	"github.com/outrelay/outrelay/internal/pipeline"
	"github.com/outrelay/outrelay/internal/retry"
	"github.com/outrelay/outrelay/internal/sink"
	"github.com/outrelay/outrelay/resume"
)

var (
	// errStopping ends the reading of a term. The term is drained next.
	errStopping = errors.New("stopping")
	// errReadEnded ends the monitor after the reading has ended for another reason.
	errReadEnded = errors.New("reading ended")
)

// term is one period of ownership: from the acquisition of the lease to its release or loss.
type term struct {
	slot *runner

	held       *lease.Held
	dispatcher *pipeline.Dispatcher
	sink       *sink.Sink
	stream     *changestream.Stream
	pump       *pipeline.Pump
	reconciler *reconciler
	dirty      *dirtyList
	stats      *termStats
	progress   progress
	log        *slog.Logger

	delivering   atomic.Pointer[pipeline.Dispatcher] // set when the takeover is done
	stopRenewing func()

	// background is joined last, after the release of the lease. runInBackground starts a goroutine
	// in it, with a context that ends with the term.
	background      sync.WaitGroup
	runInBackground func(func(context.Context))

	fenceEvents fenceEvents // events of the fence that are not stored yet

	// Used only by the monitor.
	brokersAway  bool            // targets wait because their brokers cannot be reached
	parkedTopics map[string]bool // topics that are parked
	lapsedPin    string          // the dead node of a pin, once that is in the events log

	// Used only by the goroutine that stores exceptions, and by the recorder of deliveries.
	withDeadLetters  map[string]bool      // collections that got dead letters in this term
	unstampedCount   uint32               // exceptions without a server timestamp
	recordingRefused map[string]time.Time // when a collection last refused a recorded delivery

	stampMargin time.Duration // by which server timestamps may be older than the commit of their envelopes
	seal        []byte        // of the state database; without it, a service wrote the state of an envelope

	watched struct {
		sync.Mutex
		outboxes []outboxes.Outbox // the watched collections, as they were listed last
	}
	collections map[[16]byte]bool // registered for this watcher, by UUID (N25)

	reopenedAt resume.Position // where the stream was last reopened by time
	gap        *lostStretch    // to be swept before the stream is read
	gapPacing  gapPacing
	renamed    renames
	sweeping   atomic.Pointer[sweepProgress] // set while positions are those of a sweep

	// startMu guards these fields: the end of a sweep replaces them while the monitor saves them.
	startMu            sync.Mutex
	from               resume.Position        // where the stream was started
	drainedSlots       []pipeline.DrainedSlot // delivered by the slots of the previous division
	unsavedDescription *lease.Update          // of the new stream; saved once the watermark has passed from
}

// currentTerm gives health and metrics the term that delivers now, if any.
type currentTerm struct{ t atomic.Pointer[term] }

func (v *currentTerm) set(t *term) { v.t.Store(t) }
func (v *currentTerm) get() *term  { return v.t.Load() }

// serveTerm runs one term. It returns nil when stop ended the term. It returns only after every
// goroutine of the term has ended (N2).
func (r *runner) serveTerm(stop, work context.Context, held *lease.Held) error {
	work, cancel := context.WithCancelCause(work)
	defer cancel(nil)
	g, work := errgroup.WithContext(work)
	t := &term{
		slot:             r,
		held:             held,
		withDeadLetters:  map[string]bool{},
		recordingRefused: map[string]time.Time{},
		stats:            newTermStats(),
		log:              r.log.With("epoch", held.Document().Epoch),
	}
	r.metrics.LeaseOwner.Set(1)
	held.SetSource(t.currentCheckpoint)

	// A request to hand over that is still queued was meant for an earlier term.
	select {
	case <-r.yield:
	default:
	}

	// The lease is renewed during the whole takeover (N1).
	renew, stopRenewing := context.WithCancel(work)
	defer stopRenewing()
	t.stopRenewing = stopRenewing
	g.Go(func() error { return ignoreStop(renew, held.Run(renew)) })

	t.runInBackground = func(f func(context.Context)) { t.background.Go(func() { f(work) }) }
	r.state.clearHung()
	err := t.runTerm(stop, work, g)

	// If a stage ended the term, the error of runTerm is only its consequence.
	if cause := context.Cause(work); cause != nil && !errors.Is(cause, context.Canceled) {
		err = cause
	}

	r.current.set(nil)
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
	t.background.Wait()

	if t.dispatcher != nil {
		t.dispatcher.LeavePool()
	}
	r.state.clearProblems(termParts...)
	r.setBlockedGauges(nil)
	r.metrics.LeaseOwner.Set(0)
	return err
}

// termParts are the parts of the state that a term reports problems of.
var termParts = []string{"kafka", "stream", "mongodb", "stuck", "budget", "reconciler"}

// ignoreStop returns nil if a stage returned err because ctx ended, and err otherwise.
func ignoreStop(ctx context.Context, err error) error {
	if ctx.Err() != nil && (errors.Is(err, context.Canceled) || errors.Is(err, context.Cause(ctx))) {
		return nil
	}
	return err
}

// runTerm takes over, then reads and delivers until stop ends, an operator requests the lease, or a
// stage fails. It drains before it returns.
func (t *term) runTerm(stop, work context.Context, g *errgroup.Group) error {
	read, stopRead := context.WithCancelCause(work)
	defer stopRead(nil)
	defer context.AfterFunc(stop, func() { stopRead(errStopping) })()

	var watching sync.WaitGroup
	watching.Go(func() { t.monitor(read, stopRead) })

	t.slot.state.setRole(RoleTakeOver)
	start, err := t.takeOver(read, work, g)
	if err == nil {
		t.slot.state.setRole(RoleOwner)
		err = t.readStream(read, start)
	}

	// The monitor ends before haltWithLease reads the control channel. Otherwise the monitor could
	// consume an operator's request.
	stopRead(errReadEnded)
	watching.Wait()
	cause := context.Cause(read)
	if work.Err() != nil {
		return context.Cause(work)
	}

	if errors.Is(cause, errStopping) {
		t.slot.state.setRole(RoleStopping)
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
		if start, err = t.findNextStart(ctx, err); err != nil {
			return err
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
	t.background.Go(func() {
		defer close(batches)
		ended <- t.stream.Run(inner, start, batches)
	})

	// The stream is open during the sweep, but held: the reader blocks with its first batch.
	if t.gap != nil {
		if err := t.sweepGap(ctx); err != nil {
			return err
		}
	}

	// After an error the reader is not awaited, and it delivers nothing more. A server may answer
	// its last request only at the next write, and the lease must be released before. serveTerm
	// joins the reader.
	if err := t.pump.Run(ctx, batches); err != nil {
		return err
	}
	return <-ended
}

// drainStream waits until all events that were read are acked or stored as exceptions. It gives up
// after the configured time, or when only blocked targets are left. The next owner reads the rest
// back.
func (t *term) drainStream(work context.Context) {
	if t.sink == nil {
		return
	}

	ctx, cancel := context.WithTimeout(work, t.slot.cfg.Drain)
	defer cancel()
	for acked := int64(-1); t.drainBriefly(ctx) != nil; {
		if ctx.Err() != nil || acked == t.progress.acked.Load() && t.hasBlockedTargets() {
			n, _ := t.dispatcher.Unresolved()
			t.log.Warn("stopping with undelivered events; the next owner delivers them", "unresolved", n)
			break
		}
		acked = t.progress.acked.Load()
	}

	if t.sweeping.Load() != nil {
		if err := t.saveCursor(ctx); err != nil {
			t.log.Warn("cannot save the cursor of the sweep; the next owner repeats a part of it", "reason", err)
		}
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

	t.announceReleased(work, why)
	return nil
}

// haltWithLease keeps the lease if err is a *HaltError, so that no standby runs into the same
// problem. It blocks until stop ends, the lease is lost, or an operator requests the lease. It
// returns any other err at once.
func (t *term) haltWithLease(stop, work context.Context, err error) error {
	halt, ok := errors.AsType[*HaltError](err)
	if !ok {
		return err
	}

	t.slot.state.setRole(RoleHalted)
	t.slot.reportProblem("halted", halt, true)
	t.stats.setHalted(halt.Error())
	t.appendEvent(work, nodes.Halted, bson.D{{Key: "reason", Value: halt.Error()}})
	defer t.slot.state.clearProblems("halted")

	for {
		select {
		case <-stop.Done():
			return nil
		case <-work.Done():
			return context.Cause(work)
		case c := <-t.held.Control():
			if c.Yield != "" {
				return fmt.Errorf("%w: %s", errStepDown, c.Yield)
			}
		}
	}
}

// currentCheckpoint returns the checkpoint that the next renewal saves.
func (t *term) currentCheckpoint() lease.Checkpoint {
	c := lease.Checkpoint{Stats: t.stats.encode()}
	disp := t.delivering.Load()
	if disp == nil || t.sweeping.Load() != nil {
		return c
	}

	// While a gap is open the position stays before it (N22). A sweep may have begun since the
	// check above.
	pos, ok, offsets := disp.Snapshot()
	if ok && t.sweeping.Load() == nil {
		c.Position = pos
		c.Offsets = offsets
	}
	return c
}

// appendEvent appends an entry to the events log. It waits at most two seconds. A failure is only
// logged.
func (t *term) appendEvent(ctx context.Context, kind nodes.Kind, fields bson.D) {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()

	fields = append(fields, bson.E{Key: "epoch", Value: t.held.Document().Epoch})
	if !t.slot.part.Whole() {
		fields = append(fields, bson.E{Key: "slot", Value: t.slot.part.String()})
	}
	if err := t.slot.events.Append(ctx, kind, fields); err != nil {
		t.log.Warn("an entry of the events log is lost", "kind", string(kind), "reason", err)
	}
}

// retryFenced repeats a fenced write until it succeeds, the lease is lost, or ctx ends.
func (t *term) retryFenced(ctx context.Context, op func() error) error {
	err := retry.Do(ctx, retry.Reopen, func(context.Context) error {
		err := op()
		if errors.Is(err, lease.ErrLeaseLost) {
			return retry.Permanent(err)
		}
		return err
	}, func(err error, _ time.Duration) { t.slot.reportProblem("mongodb", err, false) })
	if err == nil {
		t.slot.state.clearProblems("mongodb")
	}
	return err
}

var _ pipeline.Sink = (*sink.Sink)(nil)
