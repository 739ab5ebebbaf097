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
	held     *lease.Held
	disp     *dispatch.Dispatcher
	sink     *kafka.Sink
	stream   *changestream.Stream
	pump     *pump
	progress progress
	stats    *termStats
	log      *slog.Logger

	delivering   atomic.Pointer[dispatch.Dispatcher] // set when the take-over is done
	stopRenewing func()
	readers      sync.WaitGroup              // joined last: nobody waits for them before the lease is released
	later        func(func(context.Context)) // runs beside the term, joined with readers
	unreachable  bool                        // what waits does so because brokers are away; the monitor's
	found        found                       // events of the fence that are not written yet
	parked       map[string]bool             // topics that are held back; the monitor's
	lapsed       string                      // the dead node of a pin that was told of; the monitor's
	lettered     map[string]bool             // collections with dead letters; the exception writer's
	unstamped    uint32                      // exceptions without a stamp, counted; the exception writer's
	unrecorded   map[string]time.Time        // collections that refused a record of deliveries; the recorder's
	dirty        *dirty
	rec          *reconciler
	margin       time.Duration // by which stamps may be older than the commits of their envelopes
	known        struct {
		sync.Mutex
		outboxes []store.Outbox // what is watched, as far as it is known
	}
	seal     []byte          // of the state database: documents without it got their state from a service
	byTime   resume.Position // where the stream was reopened by time last
	gap      *gap            // to be swept before the stream is read
	rounds   rounds
	renamed  renames
	sweeping atomic.Pointer[sweeping] // set while positions are those of a sweep

	collections map[[16]byte]bool // claimed by this watcher (N25)

	// The end of a sweep replaces these three, while the monitor saves them.
	startMu sync.Mutex
	from    resume.Position // where the stream was started
	passed  []passed        // what other slots had delivered before the watcher was divided anew
	fresh   *lease.Update   // what describes the new stream, to be saved once the watermark has passed from
}

// running gives health and metrics the term that delivers now, if any.
type running struct{ t atomic.Pointer[term] }

func (v *running) set(t *term) { v.t.Store(t) }
func (v *running) get() *term  { return v.t.Load() }

// serve runs one term. It returns nil when stop ended it, and only after every goroutine of the term has ended.
func (r *runner) serve(stop, work context.Context, held *lease.Held) error {
	work, cancel := context.WithCancelCause(work)
	defer cancel(nil)
	g, work := errgroup.WithContext(work)
	t := &term{runner: r, held: held, lettered: map[string]bool{}, unrecorded: map[string]time.Time{}, stats: newTermStats(), log: r.log.With("epoch", held.Document().Epoch)}
	r.metrics.LeaseOwner.Set(1)
	held.SetSource(t.checkpoint)
	select { // what was asked of an earlier term
	case <-r.yield:
	default:
	}
	renew, stopRenewing := context.WithCancel(work)
	defer stopRenewing()
	t.stopRenewing = stopRenewing
	g.Go(func() error { return endOf(renew, held.Run(renew)) }) // renewed all through the take-over (N1)

	t.later = func(f func(context.Context)) { t.readers.Go(func() { f(work) }) }
	r.state.moves()
	err := t.run(stop, work, g)
	if cause := context.Cause(work); cause != nil && !errors.Is(cause, context.Canceled) {
		err = cause // a stage ended the term; what run saw is its consequence
	}
	r.running.set(nil)
	if !errors.Is(err, lease.ErrLeaseLost) {
		if e := t.release(work, err); e != nil && errors.Is(err, kafka.ErrFenced) {
			err = e // the lease was not ours any more, or nobody knows: the new owner has fenced this one, as it should
		}
	}
	cancel(nil)
	if e := g.Wait(); err == nil && e != nil {
		err = e
	}
	t.readers.Wait()
	if t.disp != nil {
		t.disp.Leave()
	}
	r.state.clear(termParts...)
	r.gaugeBlocked(nil)
	r.metrics.LeaseOwner.Set(0)
	return err
}

// termParts are the parts of the state that a term reports on.
var termParts = []string{"kafka", "stream", "mongodb", "stuck", "budget", "reconciler"}

// endOf is nil for a stage that ended because ctx did.
func endOf(ctx context.Context, err error) error {
	if ctx.Err() != nil && (errors.Is(err, context.Canceled) || errors.Is(err, context.Cause(ctx))) {
		return nil
	}
	return err
}

// run takes over, then reads and delivers until stop ends, an operator wants the lease back, or a stage fails.
func (t *term) run(stop, work context.Context, g *errgroup.Group) error {
	read, stopRead := context.WithCancelCause(work)
	defer stopRead(nil)
	defer context.AfterFunc(stop, func() { stopRead(errStopping) })()
	var watching sync.WaitGroup
	watching.Go(func() { t.monitor(read, stopRead) })

	t.state.setRole(RoleTakeOver)
	start, err := t.takeOver(read, work, g)
	if err == nil {
		t.state.setRole(RoleOwner)
		err = t.read(read, start)
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
	t.drain(work)
	t.drainBesides(work)
	switch {
	case errors.Is(cause, errStopping):
		return nil
	case !errors.Is(cause, errReadEnded):
		return cause
	}
	return t.halted(stop, work, err)
}

// read tails the stream and pumps it until ctx ends or the stream cannot go on.
func (t *term) read(ctx context.Context, start changestream.Start) error {
	for {
		err := t.readOnce(ctx, start)
		if start, err = t.reopen(ctx, err); err != nil {
			return err
		}
	}
}

func (t *term) readOnce(ctx context.Context, start changestream.Start) error {
	batches := make(chan *changestream.Batch)
	ended := make(chan error, 1)
	inner, cancel := context.WithCancel(ctx)
	defer cancel()
	t.readers.Go(func() {
		defer close(batches)
		ended <- t.stream.Run(inner, start, batches)
	})
	if t.gap != nil {
		if err := t.sweep(ctx); err != nil {
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

// drain waits until what was read is acked or recorded; what is not by then, the next owner reads back.
func (t *term) drain(work context.Context) {
	if t.sink == nil {
		return
	}
	ctx, cancel := context.WithTimeout(work, t.cfg.Drain)
	defer cancel()
	for acked := int64(-1); t.drainStep(ctx) != nil; {
		if ctx.Err() != nil || acked == t.progress.acked.Load() && t.blocked() {
			n, _ := t.disp.Unresolved()
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

// drainStep is how often a drain looks whether anything still moves.
const drainStep = 250 * time.Millisecond

func (t *term) drainStep(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, drainStep)
	defer cancel()
	return t.disp.Drain(ctx)
}

// blocked reports whether something waits for what a drain cannot bring.
func (t *term) blocked() bool {
	return slices.ContainsFunc(t.sink.State(), func(b kafka.Blocked) bool { return b.Count > 0 && !b.Parked })
}

// release writes the last checkpoint and gives the lease back. Only if it succeeds this process held the lease until then.
func (t *term) release(work context.Context, why error) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(work), t.cfg.Lease.TTL)
	defer cancel()
	if err := t.held.Release(ctx, t.checkpoint()); err != nil {
		t.log.Warn("the lease could not be released; it expires by itself", "reason", err, "ttl", t.cfg.Lease.TTL)
		return err
	}
	t.tellReleased(work, why)
	return nil
}

// halted keeps the lease when only a person can help, so that no standby runs into the same, until stop ends, the lease is
// lost, or an operator asks for the lease. Any other error it returns at once.
func (t *term) halted(stop, work context.Context, err error) error {
	halt, ok := errors.AsType[*HaltError](err)
	if !ok {
		return err
	}
	t.state.setRole(RoleHalted)
	t.report("halted", halt, true)
	t.stats.halt(halt.Error())
	t.announce(work, store.Halted, bson.D{{Key: "reason", Value: halt.Error()}})
	defer t.state.clear("halted")
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

// checkpoint is what each renewal writes.
func (t *term) checkpoint() lease.Checkpoint {
	c := lease.Checkpoint{Stats: t.stats.document()}
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

// announce writes an entry into the events log; a failure to do so is no failure of the relay.
func (t *term) announce(ctx context.Context, kind store.Kind, fields bson.D) {
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
	}, func(err error, _ time.Duration) { t.report("mongodb", err, false) })
	if err == nil {
		t.state.clear("mongodb")
	}
	return err
}

var _ dispatch.Sink = (*kafka.Sink)(nil)
