package app

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync/atomic"
	"time"

	"github.com/outrelay/outrelay/internal/changestream"
	"github.com/outrelay/outrelay/internal/config"
	"github.com/outrelay/outrelay/internal/kafka"
	"github.com/outrelay/outrelay/internal/lease"
	"github.com/outrelay/outrelay/internal/metrics"
	"github.com/outrelay/outrelay/internal/retry"
	"github.com/outrelay/outrelay/internal/slot"
	"github.com/outrelay/outrelay/internal/store"
	"github.com/outrelay/outrelay/internal/tracing"
)

// runner runs one slot of the watcher: one term of ownership after the other. What it has by the names of the process's
// own is the slot's: its least share of the memory, its scope, its state and metrics.
type runner struct {
	*Relay
	part    slot.Part
	cfg     config.Config
	log     *slog.Logger
	metrics *metrics.Set
	state   *state
	kafka   *kafka.Client
	scope   *changestream.Scope
	lease   *lease.Lease
	events  *store.Events
	tap     *tracing.Tap

	fencedAt      []time.Time // when Kafka fenced this owner although it held the lease (N5)
	steppedDownAt time.Time   // when it last stepped down for lack of progress (N6)
	current       currentTerm
	waitingCount  atomic.Int64 // exceptions at the last audit
	yield         chan string  // 1 slot: why the slot is to be handed over
}

func (r *Relay) newRunner(p slot.Part, m *metrics.Set) (*runner, error) {
	one := &runner{
		Relay: r, part: p, cfg: r.cfg, log: r.log, metrics: m, state: r.state, kafka: r.kafka, scope: r.scope, yield: make(chan string, 1),
	}
	db := r.mongo.state.Database(r.cfg.MongoDB.State)
	one.events = store.NewEvents(db.Collection("events"), r.cfg.Watcher, r.cfg.Node)
	c := lease.Config{
		Collection: db.Collection("watchers"), ID: p.ID(r.cfg.Watcher),
		Node: r.cfg.Node, Address: r.cfg.Address, Version: r.version,
		TTL: r.cfg.Lease.TTL, Renew: r.cfg.Lease.Renew, CheckpointEvery: min(r.cfg.Checkpoint, r.cfg.Lease.Renew),
		NodeAlive: r.nodeAlive, Log: r.log, Metrics: m,
		Absent: func(ctx context.Context) error { return one.checkRedivided(ctx) },
	}
	if !p.Whole() {
		// What a sweep remembers, and what one target may hold before it is parked, has to hold when all slots run here; what is
		// read and not yet acknowledged follows the slots that do.
		one.cfg.Limits.Memory = r.cfg.Limits.Memory / config.Size(p.N)
		one.log = r.log.With("slot", p.String())
		one.state = newState(r.cfg.HTTP.Readiness, time.Now)
		one.scope = r.scope.Of(p)
		one.kafka = r.kafka.For(one.log, m, int64(one.cfg.Limits.Memory))
		c.Admit = func(pinned bool) (time.Duration, func(bool)) { return r.balancer.admitAttempt(p.I, pinned) }
	}
	var err error
	if one.lease, err = lease.New(c); err != nil {
		return nil, err
	}
	one.tap = newTap(r.exporter, m, &r.clock)
	one.registerGauges()
	return one, nil
}

// displayName is the watcher's, and the slot's where there are several, for people.
func (r *runner) displayName() string {
	if r.part.Whole() {
		return r.cfg.Watcher
	}
	return r.part.ID(r.cfg.Watcher)
}

// divideRetry is how long to wait before it is asked again whether the watcher has as many slots as are configured.
const divideRetry = 5 * time.Second

// waitForDivision waits until the watcher is divided as this process is told to. Its error is the end of ctx.
func (r *runner) waitForDivision(ctx context.Context) error {
	for {
		err := r.checkDivision(ctx)
		if err == nil || r.part.Whole() && !errors.Is(err, store.ErrDivided) {
			r.state.clearProblems("slots") // where the answer cannot be had, one slot goes on as ever
			return nil
		}
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		r.reportProblem("slots", err, errors.Is(err, store.ErrDivided))
		if err := retry.Sleep(ctx, divideRetry); err != nil {
			return err
		}
	}
}

func (r *runner) checkDivision(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, schemaTimeout)
	defer cancel()
	return r.divisions.Agree(ctx, r.cfg.Watcher, r.part)
}

// checkRedivided is the error of a watcher that has another number of slots by now; what cannot be had is not asked for again.
func (r *runner) checkRedivided(ctx context.Context) error {
	if err := r.checkDivision(ctx); errors.Is(err, store.ErrDivided) {
		return err
	}
	return nil
}

// confirmDivision asks again when the lease is held: the watcher may have been divided anew between the question and the
// acquisition, which has then made a document that must not be there.
func (t *term) confirmDivision(ctx context.Context) error { return t.checkRedivided(ctx) }

// discardDocument removes the document that the acquisition has made.
func (r *runner) discardDocument() {
	ctx, cancel := context.WithTimeout(context.Background(), schemaTimeout)
	defer cancel()
	if err := r.divisions.Discard(ctx, r.part.ID(r.cfg.Watcher)); err != nil {
		r.log.Warn("a watcher document that was made by mistake stays, and holds up the purge", "document", r.part.ID(r.cfg.Watcher), "reason", err)
	}
}

// ownSlot holds the lease, again and again, until stop ends.
func (r *runner) ownSlot(stop, work context.Context) error {
	backoff := retry.Reopen.Start()
	for stop.Err() == nil {
		r.state.setRole(RoleStandby)
		if err := r.waitForDivision(stop); err != nil {
			return nil //nolint:nilerr // the end of stop is no error
		}
		held, err := r.lease.Acquire(stop)
		if err != nil {
			if stop.Err() != nil {
				return nil
			}
			if errors.Is(err, store.ErrDivided) {
				continue // and say so
			}
			r.reportProblem("lease", err, true)
			if retry.Sleep(stop, configRetry) != nil {
				return nil
			}
			continue
		}
		r.state.clearProblems("lease")
		began := time.Now()
		err = r.serveTerm(stop, work, held)
		r.balancer.slotReleased(r.part.I)
		if err == nil || stop.Err() != nil {
			return nil
		}
		if time.Since(began) > time.Minute {
			backoff.Reset()
		}
		if again, halt := r.classifyEnd(stop, err); halt != nil {
			if r.haltWithoutLease(stop, halt) != nil {
				return nil
			}
		} else if again {
			continue
		}
		if backoff.Wait(stop) != nil {
			return nil
		}
	}
	return nil
}

// configRetry is how long to wait between attempts at what only a person can mend.
const configRetry = 30 * time.Second

// classifyEnd says why a term ended, and reports whether the lease may be sought again at once, or not at all.
func (r *runner) classifyEnd(stop context.Context, err error) (again bool, halt *HaltError) {
	switch {
	case errors.Is(err, lease.ErrLeaseLost):
		r.announceLeaseLost(stop, err)
		return true, nil
	case errors.Is(err, errGapTooLate):
		r.log.Warn("taking over anew", "reason", err)
		return true, nil
	case errors.Is(err, errStepDown):
		r.log.Info("stepped down", "reason", err)
		return true, nil
	case errors.Is(err, store.ErrDivided):
		r.discardDocument()
		return true, nil // said when it is asked for the next time
	case errors.Is(err, kafka.ErrReopen):
		r.log.Warn("taking over anew in Kafka", "reason", err)
		return true, nil // the sink bounds how often
	case errors.Is(err, kafka.ErrBroken):
		r.log.Warn("Kafka forgot the producer's sequence; taking over anew with a read-back", "reason", err)
		return false, nil // after a wait: an answer that persists must not burn producer epochs
	case errors.Is(err, kafka.ErrFenced):
		r.log.Warn("Kafka fenced this owner although it holds the lease; taking over anew", "reason", err)
		return true, r.recordFenced(time.Now(), err)
	}
	r.log.Error("the term ended; trying again", "reason", err)
	return false, nil
}

const (
	fencedLimit = 3
	fencedSpan  = time.Minute
	// fencedHalt is how long the lease is left alone then. Another take-over loses nothing, so nobody has to start the process again.
	fencedHalt = 5 * time.Minute
)

// recordFenced is N5's limit: somebody else uses the transactional id, and taking it from each other for ever helps nobody.
func (r *runner) recordFenced(now time.Time, err error) *HaltError {
	r.fencedAt = slices.DeleteFunc(append(r.fencedAt, now), func(t time.Time) bool { return now.Sub(t) > fencedSpan })
	if len(r.fencedAt) < fencedLimit {
		return nil
	}
	return &HaltError{
		What: fmt.Sprintf("Kafka fenced the owner of watcher %s %d times within %s while it held the lease: another program uses its transactional id", r.displayName(), fencedLimit, fencedSpan),
		Err:  err,
		Fix:  fmt.Sprintf("find the other program (was the state database copied to another cluster?); this process tries again every %s", fencedHalt),
	}
}

// haltWithoutLease waits without the lease, for [fencedHalt] or until stop ends, which is its error.
func (r *runner) haltWithoutLease(stop context.Context, halt *HaltError) error {
	r.state.setRole(RoleHalted)
	r.reportProblem("halted", halt, true)
	defer r.state.clearProblems("halted")
	r.fencedAt = nil
	return retry.Sleep(stop, fencedHalt)
}

// reportProblem tells of a problem once, not at each attempt.
func (r *runner) reportProblem(part string, err error, fatal bool) {
	if r.state.setProblem(part, err.Error(), fatal) {
		r.log.Error(part+": "+err.Error(), "part", part)
	}
}
