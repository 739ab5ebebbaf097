package app

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync/atomic"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/changestream"
	"github.com/outrelay/outrelay/internal/config"
	"github.com/outrelay/outrelay/internal/kafkawire"
	"github.com/outrelay/outrelay/internal/lease"
	"github.com/outrelay/outrelay/internal/metrics"
	"github.com/outrelay/outrelay/internal/migrate"
	"github.com/outrelay/outrelay/internal/nodes"
	"github.com/outrelay/outrelay/internal/outboxes"
	"github.com/outrelay/outrelay/internal/pipeline"
	"github.com/outrelay/outrelay/internal/retry"
	"github.com/outrelay/outrelay/internal/routing"
	"github.com/outrelay/outrelay/internal/sink"
	"github.com/outrelay/outrelay/internal/slot"
	"github.com/outrelay/outrelay/internal/slots"
	"github.com/outrelay/outrelay/internal/tracing"
)

// shared contains what the slots of a process share.
type shared struct {
	cfg       config.Config
	log       *slog.Logger
	version   string
	steps     []migrate.Step // the migrations of this version
	state     *state         // of the process
	clock     serverClock
	mongo     *clients
	kafka     *kafkawire.Client
	sinks     *sink.Opener
	nodes     *nodes.Nodes
	divisions *slots.Divisions
	registry  *outboxes.Registry
	scope     *changestream.Scope
	router    *routing.Router
	preset    *routing.Preset
	balancer  *slots.Balancer   // nil for one slot
	pool      *pipeline.Pool    // the memory of the slots
	exporter  *tracing.Exporter // nil unless configured
	pace      pace

	kafkaReachable atomic.Bool  // at the last heartbeat
	lastAck        atomic.Int64 // Unix nanoseconds
}

// pace contains the times that tests shorten.
type pace struct {
	call    time.Duration // deadline of a call that is cheap for the server
	clean   time.Duration // between two checks of the dirty list
	indexes time.Duration // between two attempts to make indexes
}

var defaultPace = pace{call: 10 * time.Second, clean: 10 * time.Second, indexes: 30 * time.Second}

// newMigrator returns a migrator that makes the indexes that this version declares, for the listed
// outboxes.
func (s *shared) newMigrator(outboxes func(context.Context) ([]outboxes.Outbox, error)) *migrate.Migrator {
	db := s.mongo.state.Database(s.cfg.MongoDB.State)
	return &migrate.Migrator{
		State:     db,
		Node:      s.cfg.Node,
		Version:   s.version,
		Steps:     s.steps,
		CheckStep: nodes.NewStepCheck(db),
		Log:       s.log,
		Outboxes:  outboxes,
	}
}

// isNodeAlive reports whether a node that the lease is pinned to is alive. If the node cannot be
// looked up, it returns true, so that the pin stays.
func (s *shared) isNodeAlive(ctx context.Context, node string) bool {
	ok, err := s.nodes.Alive(ctx, node, nodes.StaleAfter)
	if err != nil && !errors.Is(err, context.Canceled) {
		s.log.Debug("cannot look up the pinned node", "node", node, "reason", err)
		return true
	}
	return ok
}

// runner runs one slot of the watcher: one term of ownership after the other. Fields with the same
// name as a field of shared belong to the slot: its share of the memory, its scope, its state and
// its metrics.
type runner struct {
	shared  *shared
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
	current       atomic.Pointer[term]
	waitingCount  atomic.Int64 // exceptions at the last audit
	yield         chan string  // capacity 1: the reason why the slot has to be handed over
}

// newRunner returns the runner of the slot p. It does no I/O.
func newRunner(s *shared, p slot.Range, m *metrics.Set) (*runner, error) {
	r := &runner{
		shared:  s,
		part:    p,
		cfg:     s.cfg,
		log:     s.log,
		metrics: m,
		state:   s.state,
		sinks:   s.sinks,
		scope:   s.scope,
		yield:   make(chan string, 1),
		tap:     tracing.NewTap(s.exporter, m.PublishLatency.Exemplar, s.clock.now),
	}
	db := s.mongo.state.Database(s.cfg.MongoDB.State)
	r.events = nodes.NewEvents(db.Collection("events"), s.cfg.Watcher, s.cfg.Node)
	c := lease.Config{
		Collection:      db.Collection("watchers"),
		ID:              p.ID(s.cfg.Watcher),
		Node:            s.cfg.Node,
		Address:         s.cfg.Address,
		Version:         s.version,
		TTL:             s.cfg.Lease.TTL,
		Renew:           s.cfg.Lease.Renew,
		CheckpointEvery: min(s.cfg.Checkpoint, s.cfg.Lease.Renew),
		NodeAlive:       s.isNodeAlive,
		Log:             s.log,
		Metrics:         m,
		MayCreate:       r.checkRedivided,
	}

	if !p.Whole() {
		// The memory of a sweep, and of one target before it is parked, must suffice when all slots
		// run in this process. The budget for events that are read and not acked depends on the
		// slots that do run here.
		r.cfg.Limits.Memory = s.cfg.Limits.Memory / config.Size(p.N)
		r.log = s.log.With("slot", p.String())
		r.state = newState(s.cfg.HTTP.Readiness, time.Now, r.log)
		r.scope = s.scope.Of(p)
		r.sinks = s.sinks.ForSlot(r.log, m, int64(r.cfg.Limits.Memory))
		c.MayAttempt = func(pinned bool) (time.Duration, func(bool)) { return s.balancer.AdmitAttempt(p.I, pinned) }
	}

	var err error
	if r.lease, err = lease.New(c); err != nil {
		return nil, err
	}
	r.registerGauges()
	return r, nil
}

// registerGauges sets the sources of the metrics that are computed at each scrape.
func (r *runner) registerGauges() {
	m := r.metrics
	ofTerm := func(f func(*pipeline.Dispatcher) float64) func() float64 {
		return func() float64 {
			if t := r.current.Load(); t != nil {
				return f(t.dispatcher)
			}
			return 0
		}
	}

	// A standby reports the limits that it would have if all slots ran in this process.
	limits := func() (bytes, tickets int64) {
		if t := r.current.Load(); t != nil {
			return t.dispatcher.Limits()
		}
		return int64(r.cfg.Limits.Memory), int64(r.cfg.Limits.Tickets)
	}
	m.Budget.SetSource(func() float64 {
		bytes, _ := limits()
		return float64(bytes)
	})
	m.MaxTicketWindow.SetSource(func() float64 {
		_, tickets := limits()
		return float64(tickets)
	})

	now := r.shared.clock.now
	m.Lag.SetSource(ofTerm(func(d *pipeline.Dispatcher) float64 { return d.Lag(now()).Seconds() }))
	m.TokenAge.SetSource(ofTerm(func(d *pipeline.Dispatcher) float64 { return tokenAge(d, now()).Seconds() }))
	m.TicketWindow.SetSource(ofTerm(func(d *pipeline.Dispatcher) float64 {
		n, _ := d.Unresolved()
		return float64(n)
	}))
	m.BudgetUsed.SetSource(ofTerm(func(d *pipeline.Dispatcher) float64 {
		_, b := d.Unresolved()
		return float64(b)
	}))
}

// isDelivering reports whether a term of this slot delivers now.
func (r *runner) isDelivering() bool { return r.current.Load() != nil }

// watchedOutboxes returns the collections that the current term watches.
func (r *runner) watchedOutboxes() []outboxes.Outbox {
	if t := r.current.Load(); t != nil {
		return t.collections.watchedOutboxes()
	}
	return nil
}

// reachedTime returns the cluster time of the current term's position, or zero if there is none.
func (r *runner) reachedTime() (at bson.Timestamp) {
	if t := r.current.Load(); t != nil {
		pos, _ := t.dispatcher.Reached()
		at, _ = pos.Time()
	}
	return at
}

// requestHandOver requests that the slot is handed over. It returns false if the slot has not
// received an earlier request yet.
func (r *runner) requestHandOver(reason string) bool {
	select {
	case r.yield <- reason:
		return true
	default:
		return false
	}
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
		r.state.reportProblem("slots", err, errors.Is(err, slots.ErrDivided))
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
	return r.shared.divisions.Agree(ctx, r.cfg.Watcher, r.part)
}

// checkRedivided is like checkDivision, but ignores all other errors.
func (r *runner) checkRedivided(ctx context.Context) error {
	if err := r.checkDivision(ctx); errors.Is(err, slots.ErrDivided) {
		return err
	}
	return nil
}

// discardDocument removes the document that the acquisition has made by mistake.
func (r *runner) discardDocument() {
	ctx, cancel := context.WithTimeout(context.Background(), schemaTimeout)
	defer cancel()
	if err := r.shared.divisions.Discard(ctx, r.part.ID(r.cfg.Watcher)); err != nil {
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

			r.state.reportProblem("lease", err, true)
			if retry.Sleep(stop, configRetry) != nil {
				return nil
			}
			continue
		}

		r.state.clearProblems("lease")
		began := time.Now()
		err = r.serveTerm(stop, work, held)
		r.shared.balancer.NoteReleased(r.part.I)
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
	r.state.reportProblem("halted", halt, true)
	defer r.state.clearProblems("halted")
	r.fencedAt = nil
	return retry.Sleep(stop, fencedHalt)
}

// announceLeaseLost appends to the events log that another node acquired the lease, or that the
// lease expired.
func (r *runner) announceLeaseLost(stop context.Context, why error) {
	ctx, cancel := context.WithTimeout(stop, nodes.BeatEvery)
	defer cancel()
	err := r.events.Append(ctx, nodes.LeaseLost, bson.D{{Key: "reason", Value: why.Error()}})
	if err != nil && stop.Err() == nil {
		r.log.Warn("an entry of the events log is lost", "kind", string(nodes.LeaseLost), "reason", err)
	}
}
