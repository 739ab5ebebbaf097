package term

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync/atomic"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/base/metrics"
	"github.com/outrelay/outrelay/internal/base/retry"
	"github.com/outrelay/outrelay/internal/contract/config"
	"github.com/outrelay/outrelay/internal/contract/envelope"
	"github.com/outrelay/outrelay/internal/contract/routing"
	"github.com/outrelay/outrelay/internal/contract/slot"
	"github.com/outrelay/outrelay/internal/kafkawire"
	"github.com/outrelay/outrelay/internal/relay/activity"
	"github.com/outrelay/outrelay/internal/relay/changes"
	"github.com/outrelay/outrelay/internal/relay/connect"
	"github.com/outrelay/outrelay/internal/relay/internal/pipeline"
	"github.com/outrelay/outrelay/internal/relay/internal/sink"
	"github.com/outrelay/outrelay/internal/relay/internal/slots"
	"github.com/outrelay/outrelay/internal/relay/notices"
	"github.com/outrelay/outrelay/internal/relay/readiness"
	"github.com/outrelay/outrelay/internal/relay/stored/divisions"
	"github.com/outrelay/outrelay/internal/relay/stored/lease"
	"github.com/outrelay/outrelay/internal/relay/stored/nodes"
	"github.com/outrelay/outrelay/internal/relay/stored/outboxes"
	"github.com/outrelay/outrelay/internal/relay/stored/state"
	"github.com/outrelay/outrelay/internal/relay/tracing"
)

// Shared contains the parts that the slots of a process share.
type Shared struct {
	Config    config.Config
	Log       *slog.Logger
	Version   string
	State     *readiness.State // of the process
	Clock     connect.ServerClock
	Mongo     *connect.Clients
	Kafka     *kafkawire.Client
	Sinks     *sink.Opener
	Nodes     *nodes.Nodes
	Divisions *divisions.Divisions
	Registry  *outboxes.Registry
	Scope     *changes.Scope
	Router    *routing.Router
	Preset    *routing.Preset
	Mapping   *envelope.Mapping // nil: the documents are envelopes of the contract
	Balancer  *slots.Balancer   // nil for one slot, and in a process that runs no slot
	Pool      *pipeline.Pool    // the memory of the slots
	Exporter  *tracing.Exporter // nil unless configured
	Pace      Pace
	Hooks     notices.Hooks

	KafkaReachable atomic.Bool  // at the last heartbeat
	LastAck        atomic.Int64 // Unix nanoseconds
}

// Pace contains the times that tests shorten.
type Pace struct {
	Call    time.Duration // deadline of a call that is cheap for the server
	Clean   time.Duration // between two checks of the dirty list
	Indexes time.Duration // between two attempts to make indexes

	// Standstill is the time after which an event that stays the oldest one is reported.
	Standstill time.Duration
	// Stuck is the time after which a stream that is reopened without moving is a problem.
	Stuck time.Duration
}

// DefaultPace is the pace outside of tests.
var DefaultPace = Pace{
	Call: 10 * time.Second, Clean: 10 * time.Second, Indexes: 30 * time.Second, Standstill: 10 * time.Second,
	Stuck: 30 * time.Second,
}

// reportTransactions returns a function that reports to st that a transaction of the owner fails again and again since began, or with nil
// that none does.
func reportTransactions(st *readiness.State) func(err error, began time.Time) {
	return func(err error, began time.Time) {
		if err == nil {
			st.ClearProblems("transactions")
			return
		}
		// The lease has logged it.
		st.SetProblemSince("transactions", err.Error(), began)
	}
}

// reportTakeover returns a function that reports to st that a step of a takeover in Kafka is repeated since began, or with nil that it
// has ended.
func reportTakeover(st *readiness.State) func(err error, began time.Time) {
	return func(err error, began time.Time) {
		if err == nil {
			st.ClearProblems("takeover")
			return
		}

		fix := "outrelay doctor names the cause"
		if errors.Is(err, kafkawire.CoordinatorNotAvailable) {
			fix = "Kafka has no coordinator of transactions: transaction.state.log.replication.factor must not be above the number of brokers " +
				"(outrelay doctor compares them), and each partition of __transaction_state needs a leader"
		}
		// The fence has logged it.
		st.SetProblemSince("takeover", err.Error()+"; "+fix, began)
	}
}

// divisionTimeout bounds a read of the division. It protects against a rare mistake, and must not delay a takeover.
const divisionTimeout = 2 * time.Second

// isNodeAlive reports whether a node that the lease is pinned to is alive. If the node cannot be
// looked up, it returns true, so that the pin stays.
func (s *Shared) isNodeAlive(ctx context.Context, node string) bool {
	ok, err := s.Nodes.Alive(ctx, node, nodes.StaleAfter)
	if err != nil && !errors.Is(err, context.Canceled) {
		s.Log.Debug("cannot look up the pinned node", "node", node, "error", err)
		return true
	}
	return ok
}

// Runner runs one slot of the watcher: one term of ownership after the other. Fields with the same
// name as a field of Shared belong to the slot: its share of the memory, its scope, its state and
// its metrics.
type Runner struct {
	shared  *Shared
	Slot    slot.Range
	cfg     config.Config
	log     *slog.Logger
	metrics *metrics.Set
	State   *readiness.State
	sinks   *sink.Opener
	scope   *changes.Scope
	lease   *lease.Lease
	events  *nodes.AuditLog
	tap     *tracing.Tap

	division division

	fencedAt      []time.Time // when Kafka fenced this owner although it held the lease (N5)
	steppedDownAt time.Time   // when it last stepped down for lack of progress (N6)
	current       atomic.Pointer[term]
	yield         chan string // capacity 1: the reason why the slot has to be handed over
}

// NewRunner returns the runner of a slot. It does no I/O.
func NewRunner(shared *Shared, slot slot.Range, metricSet *metrics.Set) *Runner {
	cfg, log, st, scope, sinks := shared.Config, shared.Log, shared.State, shared.Scope, shared.Sinks
	var mayAttempt func(pinned bool) func(bool)
	if !slot.Whole() {
		// The memory of a sweep, and of one target before it is parked, must suffice when all slots
		// run in this process. The budget for events that are read and not acked depends on the
		// slots that do run here.
		cfg.Limits.Memory = shared.Config.Limits.Memory / config.Size(slot.N)
		log = shared.Log.With("slot", slot.String())
		st = readiness.NewState(shared.Config.HTTP.Readiness, time.Now, log)
		scope = shared.Scope.Of(slot)
		sinks = shared.Sinks.ForSlot(log, metricSet, int64(cfg.Limits.Memory))
		mayAttempt = func(pinned bool) func(bool) { return shared.Balancer.AdmitAttempt(slot.I, pinned) }
	}
	db := state.Open(shared.Mongo.State, shared.Config.State)
	division := division{all: shared.Divisions, watcher: cfg.Watcher, slot: slot, log: log}

	runner := &Runner{
		shared:   shared,
		Slot:     slot,
		cfg:      cfg,
		log:      log,
		metrics:  metricSet,
		State:    st,
		sinks:    sinks,
		scope:    scope,
		division: division,
		events:   nodes.NewAuditLog(db.Collection("audit"), shared.Config.Watcher, shared.Config.Node),
		tap:      tracing.NewTap(shared.Exporter, metricSet.PublishLatency.Exemplar, shared.Clock.Now),
		yield:    make(chan string, 1),
		lease: lease.New(lease.Config{
			Collection:      db.Collection("watchers"),
			ID:              slot.ID(shared.Config.Watcher),
			Node:            shared.Config.Node,
			Address:         shared.Config.Address,
			Version:         shared.Version,
			TTL:             shared.Config.Lease.TTL,
			Renew:           shared.Config.Lease.Renew,
			CheckpointEvery: min(shared.Config.Lease.Checkpoint, shared.Config.Lease.Renew),
			NodeAlive:       shared.isNodeAlive,
			Log:             shared.Log,
			Metrics:         metricSet,
			MayCreate:       division.checkRedivided,
			MayAttempt:      mayAttempt,
			Trouble:         reportTransactions(st),
			OnStandby:       func() { st.ClearProblems("lease") },
		}),
	}
	runner.registerGauges()
	return runner
}

// registerGauges sets the sources of the metrics that are computed at each scrape.
func (r *Runner) registerGauges() {
	set := func(setSource func(func() float64), withoutTerm float64, ofTerm func(*pipeline.Resolver) float64) {
		setSource(func() float64 {
			if term := r.current.Load(); term != nil {
				return ofTerm(term.resolver)
			}
			return withoutTerm
		})
	}

	// A standby reports the limits that it would have if all slots ran in this process.
	metricSet := r.metrics
	set(metricSet.Budget.SetSource, float64(r.cfg.Limits.Memory), func(resolver *pipeline.Resolver) float64 {
		bytes, _ := resolver.Limits()
		return float64(bytes)
	})
	set(metricSet.MaxTicketWindow.SetSource, float64(r.cfg.Limits.Tickets), func(resolver *pipeline.Resolver) float64 {
		_, tickets := resolver.Limits()
		return float64(tickets)
	})

	now := r.shared.Clock.Now
	metricSet.Lag.SetSource(func() float64 { return r.current.Load().measureLag(now()) })
	set(metricSet.TokenAge.SetSource, 0, func(resolver *pipeline.Resolver) float64 { return tokenAge(resolver, now()).Seconds() })
	set(metricSet.TicketWindow.SetSource, 0, func(resolver *pipeline.Resolver) float64 {
		events, _ := resolver.Unresolved()
		return float64(events)
	})
	set(metricSet.BudgetUsed.SetSource, 0, func(resolver *pipeline.Resolver) float64 {
		_, bytes := resolver.Unresolved()
		return float64(bytes)
	})
}

// IsDelivering reports whether a term of this slot delivers now.
func (r *Runner) IsDelivering() bool { return r.current.Load() != nil }

// Figures returns how many records the current term has sent, and the age of its oldest event that is not settled. ok is false if
// no term delivers or the age is unknown.
func (r *Runner) Figures() (acked int64, lag time.Duration, ok bool) {
	term := r.current.Load()
	if term == nil {
		return 0, 0, false
	}
	term.progress.stats.mu.Lock()
	defer term.progress.stats.mu.Unlock()
	current := &term.progress.stats.current
	if current.LagMS == nil {
		return 0, 0, false
	}
	return current.Acked, time.Duration(*current.LagMS) * time.Millisecond, true
}

// Activity returns the latest deliveries of the current term, or nil if no term delivers.
func (r *Runner) Activity() *activity.Log {
	if term := r.current.Load(); term != nil {
		return term.meter.activity
	}
	return nil
}

// RequestHandOver requests that the slot is handed over. It returns false if the slot has not
// received an earlier request yet.
func (r *Runner) RequestHandOver(reason string) bool {
	select {
	case r.yield <- reason:
		return true
	default:
		return false
	}
}

// discardHandOver discards a request to hand over that the ended term has not received.
func (r *Runner) discardHandOver() {
	select {
	case <-r.yield:
	default:
	}
}

// DisplayName returns the name of the watcher or, with several slots, of the slot.
func (r *Runner) DisplayName() string {
	if r.Slot.Whole() {
		return r.cfg.Watcher
	}
	return r.Slot.ID(r.cfg.Watcher)
}

// divideRetry is the pause between two checks of the number of slots.
const divideRetry = 5 * time.Second

// waitForDivision blocks until the watcher has as many slots as this process is configured for. It
// returns an error only when ctx ends.
func (r *Runner) waitForDivision(ctx context.Context) error {
	for {
		err := r.division.check(ctx)

		// If the number cannot be read, a process with one slot continues anyway.
		if err == nil || r.Slot.Whole() && !errors.Is(err, divisions.ErrDivided) {
			r.State.ClearProblems("slots")
			return nil
		}

		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if errors.Is(err, divisions.ErrDivided) {
			r.State.ReportFatalProblem("slots", err)
		} else {
			r.State.ReportProblem("slots", err)
		}
		if err := retry.Sleep(ctx, divideRetry); err != nil {
			return err
		}
	}
}

// division checks that the watcher has as many slots as this process is configured for.
type division struct {
	all     *divisions.Divisions
	watcher string
	slot    slot.Range
	log     *slog.Logger
}

// check returns divisions.ErrDivided if the watcher has another number of slots than this
// process is configured for.
func (d division) check(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, divisionTimeout)
	defer cancel()
	return d.all.Agree(ctx, d.watcher, d.slot)
}

// checkRedivided is like check, but ignores all other errors.
func (d division) checkRedivided(ctx context.Context) error {
	if err := d.check(ctx); errors.Is(err, divisions.ErrDivided) {
		return err
	}
	return nil
}

// discardDocument removes the document that the acquisition has made by mistake.
func (d division) discardDocument(stop context.Context) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(stop), divisionTimeout)
	defer cancel()
	id := d.slot.ID(d.watcher)
	if err := d.all.Discard(ctx, id); err != nil {
		d.log.Warn("cannot remove a watcher document that was made by mistake; it blocks the purge",
			"document", id, "error", err)
	}
}

// OwnSlot acquires the lease and serves a term, repeatedly, until stop ends. Its error is always
// nil.
func (r *Runner) OwnSlot(stop, work context.Context) error {
	backoff := retry.Reopen.Start()
	for stop.Err() == nil {
		r.State.SetPhase(readiness.PhaseStandby)
		if err := r.waitForDivision(stop); err != nil {
			return nil //nolint:nilerr // the end of stop is no error
		}

		held, err := r.lease.Acquire(stop)
		if err != nil {
			if stop.Err() != nil {
				return nil
			}
			// waitForDivision reports this error.
			if errors.Is(err, divisions.ErrDivided) {
				continue
			}

			r.State.ReportFatalProblem("lease", err)
			if retry.Sleep(stop, configRetry) != nil {
				return nil
			}
			continue
		}

		r.State.ClearProblems("lease")
		r.shared.Balancer.NoteAcquired(r.Slot.I)
		began := time.Now()
		err = r.serveTerm(stop, work, held)
		r.shared.Balancer.NoteReleased(r.Slot.I)
		// The balancer requests nothing of a slot that was released. It may request the next term as soon as
		// the lease is acquired, so this must not be discarded later.
		r.discardHandOver()
		if err == nil || stop.Err() != nil {
			return nil
		}

		// A term of this length shows that the obstacle of the earlier terms is gone.
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
func (r *Runner) classifyEnd(stop context.Context, err error) (again bool, halt *readiness.HaltError) {
	switch {
	case errors.Is(err, lease.ErrLeaseLost):
		r.announceLeaseLost(stop, err)
		return true, nil

	case errors.Is(err, errGapTooLate):
		r.log.Warn("taking over again", "error", err)
		return true, nil

	case errors.Is(err, errStepDown):
		r.log.Info("stepped down", "error", err)
		return true, nil

	case errors.Is(err, divisions.ErrDivided):
		// waitForDivision reports this error.
		r.division.discardDocument(stop)
		return true, nil

	case errors.Is(err, sink.ErrReopen):
		// The sink limits how often this happens.
		r.log.Warn("taking over again in Kafka", "error", err)
		return true, nil

	case errors.Is(err, sink.ErrBroken):
		// After a pause: a persistent error must not use up producer epochs.
		r.log.Warn("the session of the producer is broken; taking over again with a read-back", "error", err)
		return false, nil

	case errors.Is(err, sink.ErrFenced):
		r.log.Warn("Kafka fenced this owner although it holds the lease; taking over again", "error", err)
		return true, r.recordFenced(time.Now(), err)
	}

	r.log.Error("the term ended; trying again", "error", err)
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
func (r *Runner) recordFenced(now time.Time, err error) *readiness.HaltError {
	r.fencedAt = slices.DeleteFunc(append(r.fencedAt, now), func(moment time.Time) bool { return now.Sub(moment) > fencedSpan })
	if len(r.fencedAt) < fencedLimit {
		return nil
	}
	return &readiness.HaltError{
		What: fmt.Sprintf("Kafka fenced the owner of watcher %s %d times within %s while it held the lease: "+
			"another program uses its transactional id", r.DisplayName(), fencedLimit, fencedSpan),
		Err: err,
		Fix: fmt.Sprintf("find the other program (was the state database copied to another cluster?); "+
			"this process tries again every %s", fencedHalt),
	}
}

// haltWithoutLease waits for [fencedHalt]. It returns an error if stop ends before.
func (r *Runner) haltWithoutLease(stop context.Context, halt *readiness.HaltError) error {
	r.State.SetPhase(readiness.PhaseHalted)
	r.State.ReportFatalProblem("halted", halt)
	defer r.State.ClearProblems("halted")
	// After the pause, the limit counts from zero. Otherwise the next fencing would halt again at once.
	r.fencedAt = nil
	return retry.Sleep(stop, fencedHalt)
}

// announceLeaseLost appends to the audit log that another node acquired the lease, or that the
// lease expired.
func (r *Runner) announceLeaseLost(stop context.Context, why error) {
	r.events.AppendOrWarn(stop, r.log, nodes.LeaseLost, bson.D{{Key: "reason", Value: why.Error()}})
}
