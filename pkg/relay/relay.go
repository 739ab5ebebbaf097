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
// for, with separate connections and within a separate memory limit (limits.memory). Under load it
// needs 3 to 4 µs of processor time for each event (docs/bench.md).
//
// Limits: use a separate process if the service is deployed often or is short of processor time.
// Each stop is a take-over, which takes about 50 ms. A process that cannot renew its lease in time
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
	"sync/atomic"
	"time"

	"github.com/outrelay/outrelay/internal/process"
	"github.com/outrelay/outrelay/internal/readiness"
)

// Errors of Run and Await. Test for them with errors.Is.
var (
	// ErrRan means that Run or Close was called before. Create a new Relay instead.
	ErrRan = errors.New("this relay has run already; make a new one")

	// ErrOutdated ends Run if a newer version of outrelay has migrated the collections, so that
	// this version would do harm.
	ErrOutdated = process.ErrOutdated

	// ErrEnded ends Await if Run has returned.
	ErrEnded = errors.New("the relay has ended")
)

// Role is the role of a relay in its watcher.
type Role string

// Roles, as /readyz and `outrelay status` show them.
const (
	Starting   Role = Role(readiness.RoleStarting)
	Standby    Role = Role(readiness.RoleStandby)
	TakingOver Role = Role(readiness.RoleTakeOver)
	Owner      Role = Role(readiness.RoleOwner)
	Upgrade    Role = Role(readiness.RoleUpgrade) // waits until older nodes have stopped
	Halted     Role = Role(readiness.RoleHalted)  // waits for an operator
	Stopping   Role = Role(readiness.RoleStopping)
)

// Status is the current state of a relay.
type Status struct {
	// Role is the current role.
	Role Role

	// Ready is true for an owner that works, and for a standby that can take over.
	Ready bool

	// Reasons contains one sentence for each problem, including problems that have not lasted long
	// enough to change Ready. The sentences contain neither payloads nor secrets.
	Reasons []string
}

// Relay is one node of a watcher. It is safe for concurrent use. Create a Relay with New.
type Relay struct {
	app   *process.Relay
	ran   atomic.Bool
	ended chan struct{}
}

// Option passes a value that a file cannot contain.
type Option interface{ apply(*settings) }

type settings struct{ log *slog.Logger }

type optionFunc func(*settings)

func (f optionFunc) apply(s *settings) { f(s) }

// WithLogger sets the logger. Defaults to [slog.Default] at the time of New, and nil is the default.
// The relay never uses Config.Log.
func WithLogger(log *slog.Logger) Option {
	return optionFunc(func(s *settings) { s.log = log })
}

// New returns a relay. It does no I/O. The error lists every problem of the configuration, with the fix
// for each. Call Run, or Close if the relay is not needed.
func New(cfg Config, options ...Option) (*Relay, error) {
	var s settings
	for _, o := range options {
		o.apply(&s)
	}
	if s.log == nil {
		s.log = slog.Default()
	}

	resolved, warnings, err := cfg.resolve()
	if err != nil {
		return nil, err
	}
	for _, w := range warnings {
		s.log.Warn(w)
	}

	inner, err := process.New(resolved, moduleVersion(), s.log, process.Embedded())
	if err != nil {
		return nil, fmt.Errorf("relay: %w", err)
	}

	return &Relay{app: inner, ended: make(chan struct{})}, nil
}

// Run relays events until ctx ends. Then it stops reading, waits for the acknowledgements of events
// in flight, saves its position and releases the lease, within the time of the key drain, and
// returns nil.
//
// If a server cannot be reached, Run waits for it. It returns early only with an error that waiting
// cannot fix, such as [ErrOutdated]. A second call returns [ErrRan].
func (r *Relay) Run(ctx context.Context) error {
	if !r.ran.CompareAndSwap(false, true) {
		return ErrRan
	}
	defer close(r.ended)

	if err := r.app.Run(ctx); err != nil {
		return fmt.Errorf("relay: %w", err)
	}
	return nil
}

// Close releases the connections of a relay that was not run. After Run it does nothing.
func (r *Relay) Close() {
	if r.ran.CompareAndSwap(false, true) {
		r.app.Close()
		close(r.ended)
	}
}

// Status returns the current state of the relay. It does no I/O.
func (r *Relay) Status() Status {
	ok, role, reasons := r.app.Ready()
	return Status{Role: Role(role), Ready: ok, Reasons: reasons}
}

// awaitInterval is the time between two checks of Await.
const awaitInterval = 20 * time.Millisecond

// Await blocks until the relay has one of the roles, or without roles until it is ready. If ctx
// ends before, it returns the cause of ctx. If the relay ends before, it returns [ErrEnded]. Use it
// in tests, and in programs that start their parts in order.
func (r *Relay) Await(ctx context.Context, roles ...Role) error {
	tick := time.NewTicker(awaitInterval)
	defer tick.Stop()

	for !r.Status().matchesRoles(roles) {
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

// matchesRoles reports whether the role is one of roles, or without roles whether the relay is
// ready.
func (s Status) matchesRoles(roles []Role) bool {
	if len(roles) == 0 {
		return s.Ready
	}
	return slices.Contains(roles, s.Role)
}

// Handler returns a handler for the paths /livez, /readyz and /metrics of the relay. The metrics
// have a separate registry.
func (r *Relay) Handler() http.Handler { return r.app.Handler() }

// moduleVersion returns the version of this module in the running program, or "dev".
func moduleVersion() string {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return "dev"
	}

	const path = "github.com/outrelay/outrelay"

	// The module is a dependency of the program, or its main module.
	for _, m := range append(info.Deps, &info.Main) {
		if m.Path == path && m.Version != "" && m.Version != "(devel)" {
			return m.Version
		}
	}

	return "dev"
}
