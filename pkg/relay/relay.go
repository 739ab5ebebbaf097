// Package relay runs a watcher inside another program: the same relay as `outrelay run`, as a part of a service.
//
// Every instance of the service may run one: they share a lease, so one of them works and the others stand by. It follows the
// change stream of the whole outbox, whichever instance appended, and needs no call after an append.
//
// What it promises is what the program promises: order for each key, nothing lost, take-over within lease.ttl. It blocks
// nothing of the service: all it does happens in goroutines that Run starts and joins, over connections of its own, in
// limits.memory of its own. It costs the service that memory and, under load, 3 to 4 µs of processor time for each event (docs/bench.md). A
// service that is deployed often, or starved of processor time, is a worse place for it than a process of its own: each stop is
// a hand-over (some 50 ms), and a process that cannot renew in time loses the lease.
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
	"sync/atomic"
	"time"

	"github.com/outrelay/outrelay/internal/app"
	"github.com/outrelay/outrelay/internal/config"
)

// Errors of Run and Await, for errors.Is.
var (
	// ErrRan refuses a second Run.
	ErrRan = errors.New("this relay has run already; make a new one")
	// ErrOutdated ends Run where a newer version has migrated the collections to what this one would harm.
	ErrOutdated = app.ErrOutdated
	// ErrEnded ends Await when Run has returned.
	ErrEnded = errors.New("the relay has ended")
)

// Role is what a relay does for its watcher.
type Role string

// The roles, as /readyz and `outrelay status` show them.
const (
	Starting   Role = Role(app.RoleStarting)
	Standby    Role = Role(app.RoleStandby)
	TakingOver Role = Role(app.RoleTakeOver)
	Owner      Role = Role(app.RoleOwner)
	Admin      Role = Role(app.RoleAdmin)   // by `roles` it relays nothing
	Upgrade    Role = Role(app.RoleUpgrade) // it waits for older nodes to go
	Halted     Role = Role(app.RoleHalted)  // it waits for an operator
	Stopping   Role = Role(app.RoleStopping)
)

// Status is how a relay does.
type Status struct {
	Role Role
	// Ready is true for an owner that works and a standby that can take over.
	Ready bool
	// Reasons are sentences that say what is wrong, also before it has lasted long enough to change Ready. They hold neither
	// payloads nor secrets.
	Reasons []string
}

// Relay is one node of a watcher. Its methods may be called from any goroutine.
type Relay struct {
	app   *app.Relay
	ran   atomic.Bool
	ended chan struct{}
}

// Option is one setting. The later of two that say the same holds.
type Option func(*settings)

type settings struct {
	file string
	env  []string
	set  []string
	log  *slog.Logger
}

// File reads the keys of a YAML file as `outrelay run --config` does. Options that set a key win over it.
func File(path string) Option { return func(s *settings) { s.file = path } }

// Environ takes the variables OUTRELAY_… of an environment, as [os.Environ] has it. They win over File. Without this option
// the environment is not looked at, but for ${env:NAME} in values, which needs it too.
func Environ(env []string) Option { return func(s *settings) { s.env = env } }

// Set sets any key of the configuration by its path, as `--set` does: Set("lease.ttl", "2s"). Lists of words are divided by
// commas; outrelay.example.yaml names all keys with their defaults. It wins over File and Environ.
func Set(path, value string) Option {
	return func(s *settings) { s.set = append(s.set, path+"="+value) }
}

// MongoDB sets mongodb.uri. The relay opens connections of its own: it sets them to what it relies on.
func MongoDB(uri string) Option { return Set("mongodb.uri", uri) }

// Brokers sets kafka.brokers, each host:port.
func Brokers(addresses ...string) Option { return list("kafka.brokers", addresses) }

// Watch sets watch: the outbox collections as database.collection, or patterns of them. The default is the collection outbox of
// the database that the URI names.
func Watch(collections ...string) Option { return list("watch", collections) }

// Logger takes the relay's log. The default is [slog.Default] at the time of New.
func Logger(log *slog.Logger) Option { return func(s *settings) { s.log = log } }

func list(path string, values []string) Option {
	return Set(path, strings.Join(values, ","))
}

// New makes a relay without I/O. MongoDB and Brokers, or the same keys in a file or environment, are what it cannot do
// without; all else has the defaults of the program, but that it listens nowhere (http.listen is off: see [Relay.Handler]). The
// error names every problem of the configuration at once and what to do about each.
func New(options ...Option) (*Relay, error) {
	s := settings{log: slog.Default()}
	for _, o := range options {
		o(&s)
	}
	defaults := config.Default()
	defaults.HTTP.Listen = "off"
	cfg, warnings, err := config.LoadOver(defaults, s.file, s.env, s.set)
	if err != nil {
		return nil, fmt.Errorf("relay: %w", err)
	}
	for _, w := range warnings {
		s.log.Warn(w)
	}
	inner, err := app.New(cfg, version(), s.log, app.Embedded())
	if err != nil {
		return nil, fmt.Errorf("relay: %w", err)
	}
	return &Relay{app: inner, ended: make(chan struct{})}, nil
}

// Run works until ctx ends; then it stops reading, drains what is in flight, writes its position and releases the lease, within
// the time of the key drain, and returns nil. Servers that are away end nothing: it waits for them. It returns before that only with an error
// that no waiting mends, such as [ErrOutdated]. It runs once.
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

// Close frees the connections of a relay that is never run. After Run there is nothing to do.
func (r *Relay) Close() {
	if r.ran.CompareAndSwap(false, true) {
		r.app.Close()
		close(r.ended)
	}
}

// Status tells how the relay does now. It does no I/O.
func (r *Relay) Status() Status {
	ok, role, reasons := r.app.Ready()
	return Status{Role: Role(role), Ready: ok, Reasons: reasons}
}

// lookEvery is how often Await looks.
const lookEvery = 20 * time.Millisecond

// Await returns when the relay has one of those roles, or, without any, when it is ready; else with the cause of ctx's end, or
// [ErrEnded]. It is for tests and for programs that start in an order.
func (r *Relay) Await(ctx context.Context, roles ...Role) error {
	tick := time.NewTicker(lookEvery)
	defer tick.Stop()
	for !r.Status().is(roles) {
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

func (s Status) is(roles []Role) bool {
	if len(roles) == 0 {
		return s.Ready
	}
	return slices.Contains(roles, s.Role)
}

// Handler serves /livez, /readyz and /metrics of the relay, to be mounted by the program. Its metrics are in a registry of
// their own.
func (r *Relay) Handler() http.Handler { return r.app.Handler() }

// version is that of this module in the program that it is linked into.
func version() string {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return "dev"
	}
	const path = "github.com/outrelay/outrelay"
	for _, m := range append(info.Deps, &info.Main) {
		if m.Path == path && m.Version != "" && m.Version != "(devel)" {
			return m.Version
		}
	}
	return "dev"
}
