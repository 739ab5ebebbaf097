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
	"github.com/outrelay/outrelay/internal/lease"
	"github.com/outrelay/outrelay/internal/metrics"
	"github.com/outrelay/outrelay/internal/nodes"
	"github.com/outrelay/outrelay/internal/retry"
	"github.com/outrelay/outrelay/internal/sink"
	"github.com/outrelay/outrelay/internal/slot"
	"github.com/outrelay/outrelay/internal/slots"
	"github.com/outrelay/outrelay/internal/tracing"
)

// runner runs one slot of the watcher: one term of ownership after the other. Fields with the same
// name as a field of Relay belong to the slot: its share of the memory, its scope, its state and
// its metrics.
type runner struct {
	relay   *Relay
	part    slot.Range
	cfg     config.Config
	log     *slog.Logger
	metrics *metrics.Set
	state   *state
	sinks   *sink.Opener
	scope   *changestream.Scope
	lease   *lease.Lease
	events  *nodes.Events
	tap     *tracing.Tap

	fencedAt      []time.Time // when Kafka fenced this owner although it held the lease (N5)
	steppedDownAt time.Time   // when it last stepped down for lack of progress (N6)
	current       currentTerm
	waitingCount  atomic.Int64 // exceptions at the last audit
	yield         chan string  // capacity 1: the reason why the slot has to be handed over
}

// newRunner returns the runner of the slot p. It does no I/O.
func (r *Relay) newRunner(p slot.Range, m *metrics.Set) (*runner, error) {
	one := &runner{
		relay:   r,
		part:    p,
		cfg:     r.cfg,
		log:     r.log,
		metrics: m,
		state:   r.state,
		sinks:   r.sinks,
		scope:   r.scope,
		yield:   make(chan string, 1),
	}
	db := r.mongo.state.Database(r.cfg.MongoDB.State)
	one.events = nodes.NewEvents(db.Collection("events"), r.cfg.Watcher, r.cfg.Node)
	c := lease.Config{
		Collection:      db.Collection("watchers"),
		ID:              p.ID(r.cfg.Watcher),
		Node:            r.cfg.Node,
		Address:         r.cfg.Address,
		Version:         r.version,
		TTL:             r.cfg.Lease.TTL,
		Renew:           r.cfg.Lease.Renew,
		CheckpointEvery: min(r.cfg.Checkpoint, r.cfg.Lease.Renew),
		NodeAlive:       r.nodeAlive,
		Log:             r.log,
		Metrics:         m,
		MayCreate:       func(ctx context.Context) error { return one.checkRedivided(ctx) },
	}

	if !p.Whole() {
		// The memory of a sweep, and of one target before it is parked, must suffice when all slots
		// run in this process. The budget for events that are read and not acked depends on the
		// slots that do run here.
		one.cfg.Limits.Memory = r.cfg.Limits.Memory / config.Size(p.N)
		one.log = r.log.With("slot", p.String())
		one.state = newState(r.cfg.HTTP.Readiness, time.Now)
		one.scope = r.scope.Of(p)
		one.sinks = r.sinks.ForSlot(one.log, m, int64(one.cfg.Limits.Memory))
		c.MayAttempt = func(pinned bool) (time.Duration, func(bool)) { return r.balancer.AdmitAttempt(p.I, pinned) }
	}

	var err error
	if one.lease, err = lease.New(c); err != nil {
		return nil, err
	}
	one.tap = newTap(r.exporter, m, &r.clock)
	one.registerGauges()
	return one, nil
}

// displayName returns the name of the watcher or, with several slots, of the slot.
func (r *runner) displayName() string {
	if r.part.Whole() {
		return r.cfg.Watcher
	}
	return r.part.ID(r.cfg.Watcher)
}

// divideRetry is the pause between two checks of the number of slots.
const divideRetry = 5 * time.Second

// waitForDivision blocks until the watcher has as many slots as this process is configured for. It
// returns an error only when ctx ends.
func (r *runner) waitForDivision(ctx context.Context) error {
	for {
		err := r.checkDivision(ctx)

		// If the number cannot be read, a process with one slot continues anyway.
		if err == nil || r.part.Whole() && !errors.Is(err, slots.ErrDivided) {
			r.state.clearProblems("slots")
			return nil
		}

		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		r.reportProblem("slots", err, errors.Is(err, slots.ErrDivided))
		if err := retry.Sleep(ctx, divideRetry); err != nil {
			return err
		}
	}
}

// checkDivision returns slots.ErrDivided if the watcher has another number of slots than this
// process is configured for.
func (r *runner) checkDivision(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, schemaTimeout)
	defer cancel()
	return r.relay.divisions.Agree(ctx, r.cfg.Watcher, r.part)
}

// checkRedivided is like checkDivision, but ignores all other errors.
func (r *runner) checkRedivided(ctx context.Context) error {
	if err := r.checkDivision(ctx); errors.Is(err, slots.ErrDivided) {
		return err
	}
	return nil
}

// confirmDivision checks the number of slots again while the lease is held. If the watcher was
// divided between the first check and the acquisition, the acquisition has made a document that
// must not exist.
func (t *term) confirmDivision(ctx context.Context) error { return t.slot.checkRedivided(ctx) }

// discardDocument removes the document that the acquisition has made by mistake.
func (r *runner) discardDocument() {
	ctx, cancel := context.WithTimeout(context.Background(), schemaTimeout)
	defer cancel()
	if err := r.relay.divisions.Discard(ctx, r.part.ID(r.cfg.Watcher)); err != nil {
		r.log.Warn("cannot remove a watcher document that was made by mistake; it blocks the purge",
			"document", r.part.ID(r.cfg.Watcher), "reason", err)
	}
}

// ownSlot acquires the lease and serves a term, repeatedly, until stop ends. Its error is always
// nil.
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
			// waitForDivision reports this error.
			if errors.Is(err, slots.ErrDivided) {
				continue
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
		r.relay.balancer.NoteReleased(r.part.I)
		if err == nil || stop.Err() != nil {
			return nil
		}

		if time.Since(began) > time.Minute {
			backoff.Reset()
		}
		again, halt := r.classifyEnd(stop, err)
		if halt != nil {
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

// configRetry is the pause between attempts after an error that only a person can fix.
const configRetry = 30 * time.Second

// classifyEnd logs why a term ended. again reports whether the lease may be acquired again without
// a pause. If halt is not nil, the lease must be left alone for [fencedHalt].
func (r *runner) classifyEnd(stop context.Context, err error) (again bool, halt *HaltError) {
	switch {
	case errors.Is(err, lease.ErrLeaseLost):
		r.announceLeaseLost(stop, err)
		return true, nil

	case errors.Is(err, errGapTooLate):
		r.log.Warn("taking over again", "reason", err)
		return true, nil

	case errors.Is(err, errStepDown):
		r.log.Info("stepped down", "reason", err)
		return true, nil

	case errors.Is(err, slots.ErrDivided):
		// waitForDivision reports this error.
		r.discardDocument()
		return true, nil

	case errors.Is(err, sink.ErrReopen):
		// The sink limits how often this happens.
		r.log.Warn("taking over again in Kafka", "reason", err)
		return true, nil

	case errors.Is(err, sink.ErrBroken):
		// After a pause: a persistent error must not use up producer epochs.
		r.log.Warn("Kafka forgot the producer's sequence; taking over again with a read-back", "reason", err)
		return false, nil

	case errors.Is(err, sink.ErrFenced):
		r.log.Warn("Kafka fenced this owner although it holds the lease; taking over again", "reason", err)
		return true, r.recordFenced(time.Now(), err)
	}

	r.log.Error("the term ended; trying again", "reason", err)
	return false, nil
}

const (
	fencedLimit = 3
	fencedSpan  = time.Minute
	// fencedHalt is how long the lease is left alone after fencedLimit. Another takeover loses
	// nothing, so the process needs no restart.
	fencedHalt = 5 * time.Minute
)

// recordFenced implements the limit of N5. If Kafka has fenced this owner fencedLimit times within
// fencedSpan, it returns a *HaltError: another program uses the transactional id, and the programs
// would fence each other without end.
func (r *runner) recordFenced(now time.Time, err error) *HaltError {
	r.fencedAt = slices.DeleteFunc(append(r.fencedAt, now), func(t time.Time) bool { return now.Sub(t) > fencedSpan })
	if len(r.fencedAt) < fencedLimit {
		return nil
	}
	return &HaltError{
		What: fmt.Sprintf("Kafka fenced the owner of watcher %s %d times within %s while it held the lease: "+
			"another program uses its transactional id", r.displayName(), fencedLimit, fencedSpan),
		Err: err,
		Fix: fmt.Sprintf("find the other program (was the state database copied to another cluster?); "+
			"this process tries again every %s", fencedHalt),
	}
}

// haltWithoutLease waits for [fencedHalt]. It returns an error if stop ends before.
func (r *runner) haltWithoutLease(stop context.Context, halt *HaltError) error {
	r.state.setRole(RoleHalted)
	r.reportProblem("halted", halt, true)
	defer r.state.clearProblems("halted")
	r.fencedAt = nil
	return retry.Sleep(stop, fencedHalt)
}

// reportProblem sets the problem of part in the state. It logs the problem once, not at each
// attempt.
func (r *runner) reportProblem(part string, err error, fatal bool) {
	if r.state.setProblem(part, err.Error(), fatal) {
		r.log.Error(part+": "+err.Error(), "part", part)
	}
}
