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
	"github.com/outrelay/outrelay/internal/dispatch"
	"github.com/outrelay/outrelay/internal/kafka"
	"github.com/outrelay/outrelay/internal/lease"
	"github.com/outrelay/outrelay/internal/retry"
	"github.com/outrelay/outrelay/internal/store"
	"github.com/outrelay/outrelay/resume"
)

var (
	// errStopping ends the reading of a term that is drained next.
	errStopping = errors.New("stopping")
	// errReadEnded ends what goes beside the reading, when that has ended by itself.
	errReadEnded = errors.New("reading ended")
)

// term is one stretch of ownership: from the acquisition of the lease to its release or loss.
type term struct {
	*runner
	held       *lease.Held
	dispatcher *dispatch.Dispatcher
	sink       *kafka.Sink
	stream     *changestream.Stream
	pump       *pump
	progress   progress
	stats      *termStats
	log        *slog.Logger

	delivering       atomic.Pointer[dispatch.Dispatcher] // set when the take-over is done
	stopRenewing     func()
	background       sync.WaitGroup              // joined last: nobody waits for them before the lease is released
	runInBackground  func(func(context.Context)) // runs beside the term, joined with readers
	brokersAway      bool                        // what waits does so because brokers are away; the monitor's
	fenceEvents      fenceEvents                 // events of the fence that are not written yet
	parkedTopics     map[string]bool             // topics that are held back; the monitor's
	lapsedPin        string                      // the dead node of a pin that was told of; the monitor's
	withDeadLetters  map[string]bool             // collections with dead letters; the exception writer's
	unstampedCount   uint32                      // exceptions without a stamp, counted; the exception writer's
	recordingRefused map[string]time.Time        // collections that refused a record of deliveries; the recorder's
	dirty            *dirtyList
	reconciler       *reconciler
	stampMargin      time.Duration // by which stamps may be older than the commits of their envelopes
	watched          struct {
		sync.Mutex
		outboxes []store.Outbox // what is watched, as far as it is known
	}
	seal       []byte          // of the state database: documents without it got their state from a service
	reopenedAt resume.Position // where the stream was reopened by time last
	gap        *gap            // to be swept before the stream is read
	gapPacing  gapPacing
	renamed    renames
	sweeping   atomic.Pointer[sweepProgress] // set while positions are those of a sweep

	collections map[[16]byte]bool // claimed by this watcher (N25)

	// The end of a sweep replaces these three, while the monitor saves them.
	startMu            sync.Mutex
	from               resume.Position // where the stream was started
	drainedSlots       []drainedSlot   // what other slots had delivered before the watcher was divided anew
	unsavedDescription *lease.Update   // what describes the new stream, to be saved once the watermark has passed from
}

// currentTerm gives health and metrics the term that delivers now, if any.
type currentTerm struct{ t atomic.Pointer[term] }

func (v *currentTerm) set(t *term) { v.t.Store(t) }
func (v *currentTerm) get() *term  { return v.t.Load() }

// serveTerm runs one term. It returns nil when stop ended it, and only after every goroutine of the term has ended.
func (r *runner) serveTerm(stop, work context.Context, held *lease.Held) error {
	work, cancel := context.WithCancelCause(work)
	defer cancel(nil)
	g, work := errgroup.WithContext(work)
	t := &term{runner: r, held: held, withDeadLetters: map[string]bool{}, recordingRefused: map[string]time.Time{}, stats: newTermStats(), log: r.log.With("epoch", held.Document().Epoch)}
	r.metrics.LeaseOwner.Set(1)
	held.SetSource(t.currentCheckpoint)
	select { // what was asked of an earlier term
	case <-r.yield:
	default:
	}
	renew, stopRenewing := context.WithCancel(work)
	defer stopRenewing()
	t.stopRenewing = stopRenewing
	g.Go(func() error { return ignoreStop(renew, held.Run(renew)) }) // renewed all through the take-over (N1)

	t.runInBackground = func(f func(context.Context)) { t.background.Go(func() { f(work) }) }
	r.state.clearHung()
	err := t.runTerm(stop, work, g)
	if cause := context.Cause(work); cause != nil && !errors.Is(cause, context.Canceled) {
		err = cause // a stage ended the term; what run saw is its consequence
	}
	r.current.set(nil)
	if !errors.Is(err, lease.ErrLeaseLost) {
		if e := t.releaseLease(work, err); e != nil && errors.Is(err, kafka.ErrFenced) {
			err = e // the lease was not ours any more, or nobody knows: the new owner has fenced this one, as it should
		}
	}
	cancel(nil)
	if e := g.Wait(); err == nil && e != nil {
		err = e
	}
	t.background.Wait()
	if t.dispatcher != nil {
		t.dispatcher.Leave()
	}
	r.state.clearProblems(termParts...)
	r.setBlockedGauges(nil)
	r.metrics.LeaseOwner.Set(0)
	return err
}

// termParts are the parts of the state that a term reports on.
var termParts = []string{"kafka", "stream", "mongodb", "stuck", "budget", "reconciler"}

// ignoreStop is nil for a stage that ended because ctx did.
func ignoreStop(ctx context.Context, err error) error {
	if ctx.Err() != nil && (errors.Is(err, context.Canceled) || errors.Is(err, context.Cause(ctx))) {
		return nil
	}
	return err
}

// runTerm takes over, then reads and delivers until stop ends, an operator wants the lease back, or a stage fails.
func (t *term) runTerm(stop, work context.Context, g *errgroup.Group) error {
	read, stopRead := context.WithCancelCause(work)
	defer stopRead(nil)
	defer context.AfterFunc(stop, func() { stopRead(errStopping) })()
	var watching sync.WaitGroup
	watching.Go(func() { t.monitor(read, stopRead) })

	t.state.setRole(RoleTakeOver)
	start, err := t.takeOver(read, work, g)
	if err == nil {
		t.state.setRole(RoleOwner)
		err = t.readStream(read, start)
	}
	// The monitor ends before a halt looks at control itself: it must not swallow what an operator wants.
	stopRead(errReadEnded)
	watching.Wait()
	cause := context.Cause(read)
	if work.Err() != nil {
		return context.Cause(work)
	}
	if errors.Is(cause, errStopping) {
		t.state.setRole(RoleStopping)
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

// readStream tails the stream and pumps it until ctx ends or the stream cannot go on.
func (t *term) readStream(ctx context.Context, start changestream.Start) error {
	for {
		err := t.readStreamOnce(ctx, start)
		if start, err = t.findNextStart(ctx, err); err != nil {
			return err
		}
	}
}

func (t *term) readStreamOnce(ctx context.Context, start changestream.Start) error {
	batches := make(chan *changestream.Batch)
	ended := make(chan error, 1)
	inner, cancel := context.WithCancel(ctx)
	defer cancel()
	t.background.Go(func() {
		defer close(batches)
		ended <- t.stream.Run(inner, start, batches)
	})
	if t.gap != nil {
		if err := t.sweepGap(ctx); err != nil {
			return err // the stream is held meanwhile: its first reply waits to be taken
		}
	}
	if err := t.pump.run(ctx, batches); err != nil {
		// The reader hands nothing on any more. A server may answer its last request only at the next write, so nobody
		// waits for it before the lease is released; serve joins it.
		return err
	}
	return <-ended
}

// drainStream waits until what was read is acked or recorded; what is not by then, the next owner reads back.
func (t *term) drainStream(work context.Context) {
	if t.sink == nil {
		return
	}
	ctx, cancel := context.WithTimeout(work, t.cfg.Drain)
	defer cancel()
	for acked := int64(-1); t.drainBriefly(ctx) != nil; {
		if ctx.Err() != nil || acked == t.progress.acked.Load() && t.hasBlockedTargets() {
			n, _ := t.dispatcher.Unresolved()
			t.log.Warn("not everything that was read could be delivered; the next owner does it", "unresolved", n)
			break
		}
		acked = t.progress.acked.Load()
	}
	if t.sweeping.Load() != nil {
		if err := t.saveCursor(ctx); err != nil {
			t.log.Warn("the place of the sweep could not be written; the next owner repeats some of it", "reason", err)
		}
	}
}

// drainCheckEvery is how often a drain looks whether anything still moves.
const drainCheckEvery = 250 * time.Millisecond

func (t *term) drainBriefly(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, drainCheckEvery)
	defer cancel()
	return t.dispatcher.Drain(ctx)
}

// hasBlockedTargets reports whether something waits for what a drain cannot bring.
func (t *term) hasBlockedTargets() bool {
	return slices.ContainsFunc(t.sink.State(), func(b kafka.Blocked) bool { return b.Count > 0 && !b.Parked })
}

// releaseLease writes the last checkpoint and gives the lease back. Only if it succeeds this process held the lease until then.
func (t *term) releaseLease(work context.Context, why error) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(work), t.cfg.Lease.TTL)
	defer cancel()
	if err := t.held.Release(ctx, t.currentCheckpoint()); err != nil {
		t.log.Warn("the lease could not be released; it expires by itself", "reason", err, "ttl", t.cfg.Lease.TTL)
		return err
	}
	t.announceReleased(work, why)
	return nil
}

// haltWithLease keeps the lease when only a person can help, so that no standby runs into the same, until stop ends, the lease is
// lost, or an operator asks for the lease. Any other error it returns at once.
func (t *term) haltWithLease(stop, work context.Context, err error) error {
	halt, ok := errors.AsType[*HaltError](err)
	if !ok {
		return err
	}
	t.state.setRole(RoleHalted)
	t.reportProblem("halted", halt, true)
	t.stats.setHalted(halt.Error())
	t.appendEvent(work, store.Halted, bson.D{{Key: "reason", Value: halt.Error()}})
	defer t.state.clearProblems("halted")
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

// currentCheckpoint is what each renewal writes.
func (t *term) currentCheckpoint() lease.Checkpoint {
	c := lease.Checkpoint{Stats: t.stats.encode()}
	disp := t.delivering.Load()
	if disp == nil || t.sweeping.Load() != nil {
		return c
	}
	pos, ok, offsets := disp.Snapshot()
	if ok && t.sweeping.Load() == nil { // N22: while a gap is open the position stays before it
		c.Position, c.Offsets = pos, offsets
	}
	return c
}

// appendEvent writes an entry into the events log; a failure to do so is no failure of the relay.
func (t *term) appendEvent(ctx context.Context, kind store.Kind, fields bson.D) {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	fields = append(fields, bson.E{Key: "epoch", Value: t.held.Document().Epoch})
	if !t.part.Whole() {
		fields = append(fields, bson.E{Key: "slot", Value: t.part.String()})
	}
	if err := t.events.Append(ctx, kind, fields); err != nil {
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
	}, func(err error, _ time.Duration) { t.reportProblem("mongodb", err, false) })
	if err == nil {
		t.state.clearProblems("mongodb")
	}
	return err
}

var _ dispatch.Sink = (*kafka.Sink)(nil)
