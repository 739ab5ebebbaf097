// Package relay runs a watcher inside of another program. It is the same relay as `outrelay run`.
//
// Every instance of a service may run a relay. The relays share a lease: one of them is the owner,
// and the others are standbys. The owner follows the change stream of the whole outbox, whichever
// instance has appended an event. No call is necessary after an append.
//
// Guarantees: they are the same as for the program. Events with the same key stay in order, no
// event is lost, and a standby takes over within lease.ttl.
//
// Cost: the relay blocks nothing in the service. It runs in goroutines that Run starts and waits
// for, with separate connections (except WithMongoClient) and within a separate memory limit (limits.memory). Under load it
// needs 3 to 4 µs of processor time for each event (docs/bench.md).
//
// Limits: use a separate process if the service is deployed often or is short of processor time.
// Each stop is a takeover, which takes about 50 ms. A process that cannot renew its lease in time
// loses it.
package relay

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/outrelay/outrelay/internal/base/hooks"
	"github.com/outrelay/outrelay/internal/contract/config"
	"github.com/outrelay/outrelay/internal/relay/notices"
	"github.com/outrelay/outrelay/internal/relay/process"
	"github.com/outrelay/outrelay/internal/relay/readiness"
	"github.com/outrelay/outrelay/internal/relay/stored/state"
)

// Errors of Run and Await. Test for them with errors.Is.
var (
	// ErrRan means that Run was called before. Create a new Relay instead.
	ErrRan = errors.New("this relay has run already; make a new one")

	// ErrStateUnusable ends Run if the state database has a collection of a name that the relay needs and did not
	// create, or the format of another version.
	ErrStateUnusable = state.ErrUnusable

	// ErrEnded ends Await if Run has returned.
	ErrEnded = errors.New("the relay has ended")
)

// Phase is the phase of a relay in its watcher.
type Phase string

// Phases, as /readyz and `outrelay status` show them.
const (
	Starting   Phase = Phase(readiness.PhaseStarting)
	Standby    Phase = Phase(readiness.PhaseStandby)
	TakingOver Phase = Phase(readiness.PhaseTakeOver)
	Owner      Phase = Phase(readiness.PhaseOwner)
	Halted     Phase = Phase(readiness.PhaseHalted) // waits for an operator
	Stopping   Phase = Phase(readiness.PhaseStopping)
)

// Status is the current state of a relay.
type Status struct {
	// Phase is the current phase.
	Phase Phase

	// Ready is true for an owner that works, and for a standby that can take over.
	Ready bool

	// Reasons contains one sentence for each problem, including problems that have not lasted long
	// enough to change Ready. The sentences contain neither payloads nor secrets.
	Reasons []string
}

// Relay is one node of a watcher. It is safe for concurrent use. Create a Relay with New.
type Relay struct {
	cfg      config.Config
	settings settings
	process  atomic.Pointer[process.Relay] // nil before Run
	ran      atomic.Bool
	ended    chan struct{}
}

// New returns a relay. It does no I/O except for reading the files that the configuration names, and a
// relay that never runs needs no Close. The error lists every problem of the configuration, with the fix
// for each.
func New(cfg Config, options ...Option) (*Relay, error) {
	settings := settings{log: slog.Default()}
	for _, o := range options {
		o.apply(&settings)
	}
	cfg, err := settings.replaceConnections(cfg)
	if err != nil {
		return nil, err
	}

	resolved, warnings, err := cfg.resolve()
	if err != nil {
		return nil, err
	}
	if admin := resolved.HTTP.Admin; admin != nil && !admin.IsOff() && resolved.HasTask(config.TaskAdmin) {
		return nil, fmt.Errorf("relay: %w", process.ErrNoOperators)
	}
	for _, w := range warnings {
		settings.log.Warn(w)
	}
	return &Relay{cfg: resolved, settings: settings, ended: make(chan struct{})}, nil
}

// Run relays events until ctx ends. Then it stops reading, waits for the acknowledgements of events
// in flight, saves its position and releases the lease, within the time of the key drain, and
// returns nil.
//
// If a server cannot be reached, Run waits for it. It returns early only with an error that waiting
// cannot fix, such as [ErrStateUnusable]. A second call returns [ErrRan].
func (r *Relay) Run(ctx context.Context) error {
	if !r.ran.CompareAndSwap(false, true) {
		return ErrRan
	}
	defer close(r.ended)

	// The queues end last, because each part may report something until its end.
	dead := hooks.New("WithGivenUpHook", r.settings.onDead, r.settings.log)
	defer dead.Close()
	lost := hooks.New("WithLostHistoryHook", r.settings.onLost, r.settings.log)
	defer lost.Close()
	host := r.settings.host
	host.Hooks = notices.Hooks{
		GivenUp:     func(given notices.GivenUp) { dead.Add(GivenUp(given)) },
		LostHistory: func(history notices.LostHistory) { lost.Add(LostHistory(history)) },
	}
	inner, err := process.New(r.cfg, moduleVersion(), r.settings.log, process.EmbeddedIn(host))
	if err != nil {
		return fmt.Errorf("relay: %w", err)
	}
	r.process.Store(inner)

	// The status is reported until the end, also of the drain.
	if statuses := hooks.New("WithStatusHook", r.settings.onStatus, r.settings.log); statuses != nil {
		defer statuses.Close()
		watched, stop := context.WithCancel(context.WithoutCancel(ctx))
		var watching sync.WaitGroup
		watching.Go(func() { r.watchStatus(watched, statuses) })
		defer watching.Wait()
		defer stop()
	}
	if err := inner.Run(ctx); err != nil {
		return fmt.Errorf("relay: %w", err)
	}
	return nil
}

// Status returns the current state of the relay. It does no I/O.
func (r *Relay) Status() Status {
	inner := r.process.Load()
	if inner == nil {
		return Status{Phase: Starting}
	}
	ok, phase, reasons := inner.Ready()
	return Status{Phase: Phase(phase), Ready: ok, Reasons: reasons}
}

// watchStatus adds the first status and each changed one to the queue of WithStatusHook, until ctx ends. The last one is the
// status at the end.
func (r *Relay) watchStatus(ctx context.Context, statuses *hooks.Queue[Status]) {
	tick := time.NewTicker(awaitInterval)
	defer tick.Stop()

	var last Status
	for {
		if status := r.Status(); status.differsFrom(last) {
			last = status
			statuses.Add(status)
		}
		if ctx.Err() != nil {
			return
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
		}
	}
}

// differsFrom reports whether s has another phase, another Ready, or problems of other parts of the relay than last. The texts of problems
// contain their age and the latest error, so they differ all the time.
func (s Status) differsFrom(last Status) bool {
	isSamePart := func(one, other string) bool {
		part, _, _ := strings.Cut(one, ":")
		before, _, _ := strings.Cut(other, ":")
		return part == before
	}
	return s.Phase != last.Phase || s.Ready != last.Ready || !slices.EqualFunc(s.Reasons, last.Reasons, isSamePart)
}

// awaitInterval is the time between two checks of Await.
const awaitInterval = 20 * time.Millisecond

// Await blocks until the relay has one of the phases, or without phases until it is ready. If ctx
// ends before, it returns the cause of ctx. If the relay ends before, it returns [ErrEnded]. Use it
// in tests, and in programs that start their parts in order.
func (r *Relay) Await(ctx context.Context, phases ...Phase) error {
	tick := time.NewTicker(awaitInterval)
	defer tick.Stop()

	for !r.Status().matchesPhases(phases) {
		select {
		case <-tick.C:
		case <-r.ended:
			return ErrEnded
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}

	return nil
}

// matchesPhases reports whether the phase is one of phases, or without phases whether the relay is
// ready.
func (s Status) matchesPhases(phases []Phase) bool {
	if len(phases) == 0 {
		return s.Ready
	}
	return slices.Contains(phases, s.Phase)
}

// Handler returns a handler for the paths /livez, /readyz and /metrics of the relay. The metrics
// have a separate registry. Before Run, the relay is live and not ready, and has no metrics.
func (r *Relay) Handler() http.Handler { return process.Handler(r.process.Load, r.settings.log) }

// Parts is for package operate of this module.
func (r *Relay) Parts(process.Key) process.Parts {
	return process.Parts{Config: r.cfg, Host: r.settings.host, Version: moduleVersion(), Log: r.settings.log}
}

// moduleVersion returns the version of this module in the running program as the releases write it (1.2.3), or "dev".
func moduleVersion() string {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return "dev"
	}

	const path = "github.com/outrelay/outrelay"

	// The module is a dependency of the program, or its main module.
	for _, m := range append(info.Deps, &info.Main) {
		if m.Path == path && m.Version != "" && m.Version != "(devel)" {
			return strings.TrimPrefix(m.Version, "v")
		}
	}

	return "dev"
}
