// Package app is the composition root: it builds the stages, starts them in the direction of the flow, stops them in
// reverse, and holds the order of a take-over.
//
// What it promises: one term of ownership at a time; nothing is sent before the earlier senders are fenced and the sender is
// persisted; a stop drains, checkpoints and releases, in that order; whatever ends a term, every goroutine of it has ended
// before the next begins (N2). Run returns only when its context ends or the configuration can never work.
package app

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/outrelay/outrelay/internal/changestream"
	"github.com/outrelay/outrelay/internal/config"
	"github.com/outrelay/outrelay/internal/dispatch"
	"github.com/outrelay/outrelay/internal/health"
	"github.com/outrelay/outrelay/internal/kafka"
	"github.com/outrelay/outrelay/internal/metrics"
	"github.com/outrelay/outrelay/internal/migrate"
	"github.com/outrelay/outrelay/internal/nodes"
	"github.com/outrelay/outrelay/internal/probes"
	"github.com/outrelay/outrelay/internal/routing"
	"github.com/outrelay/outrelay/internal/slot"
	"github.com/outrelay/outrelay/internal/store"
	"github.com/outrelay/outrelay/internal/systemd"
	"github.com/outrelay/outrelay/internal/tracing"
)

// Relay runs one watcher in this process: the one slot that a watcher has by default, or its share of several (N28).
type Relay struct {
	cfg     config.Config
	log     *slog.Logger
	metrics *metrics.Set
	version string

	state     *state
	clock     serverClock
	mongo     *clients
	kafka     *kafka.Client
	nodes     *store.Nodes
	member    *nodes.Member
	steps     []migrate.Step // nil are those of this version
	registry  *store.Registry
	divisions *store.Divisions
	reachable atomic.Bool  // Kafka answered the last heartbeat's question
	acked     atomic.Int64 // when Kafka acked last, Unix nanoseconds
	scope     *changestream.Scope
	router    *routing.Router
	preset    *routing.Preset
	slots     []*runner
	balance   *balance          // nil for one slot
	pool      *dispatch.Pool    // the memory that the slots of this process share
	exporter  *tracing.Exporter // nil unless configured
	figures   *figures
	embedded  bool
	// buildOperators binds the operators' page and API; nil in programs that do not contain them.
	buildOperators func(config.Config, string, *slog.Logger, *metrics.Set) (Listener, error)
	pace           pace
}

// pace is how long things take or rest; tests are faster.
type pace struct {
	call    time.Duration // what a call that costs the server little may take, before it is made again
	clean   time.Duration // between two looks for collections that hold nothing any more
	indexes time.Duration // between two attempts at what a missing privilege or a long transaction stood in the way of
}

var defaultPace = pace{call: 10 * time.Second, clean: 10 * time.Second, indexes: 30 * time.Second}

// Option changes what a relay does besides relaying.
type Option func(*Relay)

// Listener is a server that runs with the relay. Close frees one that was never run.
type Listener interface {
	Addr() string
	Run(ctx context.Context) error
	Close() error
}

// WithOperators makes the relay serve the operators' page and API where http.admin is set. New returns an error if it is set
// without this option. build binds the address; a program that does not pass it does not link page and API.
func WithOperators(build func(config.Config, string, *slog.Logger, *metrics.Set) (Listener, error)) Option {
	return func(r *Relay) { r.buildOperators = build }
}

// errNoOperators is the error of http.admin in a program without the operators' page.
var errNoOperators = errors.New("http.admin: this program does not contain the operators' page and API: remove the key, and run `outrelay run` with `roles: [admin]` beside it")

// Embedded is for a relay in another's program: what a service manager is told of the process is that program's affair.
func Embedded() Option { return func(r *Relay) { r.embedded = true } }

// New builds a relay; it does no I/O. Every error it returns is one of the configuration. One that is never run is to be
// closed.
func New(cfg config.Config, version string, log *slog.Logger, options ...Option) (*Relay, error) {
	r := &Relay{cfg: cfg, log: log, version: version, state: newState(cfg.HTTP.Readiness, time.Now), pace: defaultPace}
	for _, o := range options {
		o(r)
	}
	if r.servesOperators() && r.buildOperators == nil {
		return nil, errNoOperators
	}
	r.pool = dispatch.NewPool(int64(cfg.Limits.Memory), cfg.Limits.Tickets)
	parts := slot.Parts(cfg.Slots)
	var sets []*metrics.Set
	if len(parts) == 1 {
		r.metrics = metrics.New(version)
		sets = []*metrics.Set{r.metrics}
	} else {
		names := make([]string, len(parts))
		for i, p := range parts {
			names[i] = p.String()
		}
		r.metrics, sets = metrics.Slots(version, names)
	}
	var err error
	if r.scope, err = changestream.ParseScope(cfg.Watch, ownCollections(cfg)...); err != nil {
		return nil, fmt.Errorf("watch: %w", err)
	}
	if r.router, err = routing.New(cfg.Routing()); err != nil {
		return nil, fmt.Errorf("topics: %w", err)
	}
	if r.preset, err = routing.NewPreset(cfg.Preset()); err != nil {
		return nil, fmt.Errorf("record: %w", err)
	}
	if r.mongo, err = connect(cfg.MongoDB, cfg.Node, len(parts), log, r.metrics); err != nil {
		return nil, err
	}
	if r.kafka, err = NewKafka(cfg, log, r.metrics); err != nil {
		return nil, err
	}
	db := r.mongo.state.Database(cfg.MongoDB.State)
	r.nodes, r.registry = store.NewNodes(db.Collection("nodes")), store.NewRegistry(db.Collection("collections"))
	r.member, r.divisions = r.newMember(db), store.NewDivisions(db)
	if r.exporter, err = newExporter(cfg, version, r); err != nil {
		return nil, err
	}
	r.figures = &figures{Relay: r, judge: new(health.Evaluator)}
	if len(parts) > 1 {
		r.balance = newBalance(r)
	}
	for i, p := range parts {
		one, err := r.newRunner(p, sets[i])
		if err != nil {
			return nil, err
		}
		r.slots = append(r.slots, one)
	}
	return r, nil
}

// Run works until ctx ends, then drains and releases within the configured time.
func (r *Relay) Run(ctx context.Context) error {
	work, cancel := context.WithCancel(context.WithoutCancel(ctx))
	defer cancel()
	defer r.close(work)
	operators, err := r.operators()
	if err != nil {
		return err
	}
	g, work := errgroup.WithContext(work)
	if r.cfg.HTTP.Listen != "off" {
		srv, err := probes.Listen(r.cfg.HTTP.Listen, r.health(), r.metrics.Registry, r.log)
		if err != nil {
			err = fmt.Errorf("http.listen: %w", err)
			if operators != nil {
				err = errors.Join(err, operators.Close())
			}
			return err
		}
		g.Go(func() error { return srv.Run(work) })
	}
	if operators != nil {
		g.Go(func() error { return operators.Run(work) })
	}
	g.Go(func() error { return r.exporter.Run(work) })
	g.Go(func() error { return r.figures.run(work) })
	g.Go(func() error { return r.beat(work) })
	if !r.embedded {
		g.Go(func() error { return systemd.New(r.cfg.Watcher, r.health(), r.log).Run(ctx, work) })
	}
	g.Go(func() error {
		defer cancel()
		if !r.cfg.Is(config.RoleRelay) {
			return r.idle(ctx)
		}
		if err := r.admitted(ctx); err != nil {
			return err
		}
		return r.own(ctx, work)
	})
	if err := g.Wait(); err != nil && !errors.Is(err, context.Canceled) {
		return err
	}
	return nil
}

// servesOperators reports whether this process has to serve the operators' page and API.
func (r *Relay) servesOperators() bool { return r.cfg.HTTP.Admin != nil && r.cfg.Is(config.RoleAdmin) }

// operators binds the operators' listener; it returns nil where that is not configured.
func (r *Relay) operators() (Listener, error) {
	if !r.servesOperators() {
		return nil, nil
	}
	o, err := r.buildOperators(r.cfg, r.version, r.log, r.metrics)
	if err != nil {
		return nil, err
	}
	r.log.Info("the operator's page and API are served", "address", o.Addr())
	return o, nil
}

// Handler serves /livez, /readyz and /metrics, whatever http.listen says.
func (r *Relay) Handler() http.Handler {
	return probes.Handler(r.health(), r.metrics.Registry, r.log)
}

// Ready says what the process does for its watcher and what is wrong, as /readyz does.
func (r *Relay) Ready() (ok bool, role Role, reasons []string) {
	ok, as, reasons := r.health().Ready()
	return ok, Role(as), reasons
}

// Close frees what New made. Run does it by itself.
func (r *Relay) Close() { r.close(context.Background()) }

func (r *Relay) close(ctx context.Context) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 2*time.Second)
	defer cancel()
	r.kafka.Close()
	r.mongo.close(ctx)
}

// own runs every slot, as the node's share of them allows, until stop ends.
func (r *Relay) own(stop, work context.Context) error {
	work, cancel := context.WithCancel(work)
	defer cancel()
	var sharing errgroup.Group
	if r.balance != nil {
		r.state.setRole(RoleStandby) // its slots tell what it does
		sharing.Go(func() error { return r.balance.run(stop, work) })
	}
	var owners errgroup.Group
	for _, one := range r.slots {
		owners.Go(func() error { return one.own(stop, work) })
	}
	err := owners.Wait()
	cancel()
	return errors.Join(err, sharing.Wait())
}

// owning are the terms that deliver now.
func (r *Relay) owning() (list []*term) {
	for _, one := range r.slots {
		if t := one.running.get(); t != nil {
			list = append(list, t)
		}
	}
	return list
}

// ownCollections are never watched, whatever the pattern (N27).
func ownCollections(cfg config.Config) []string {
	return []string{cfg.MongoDB.State + ".*"}
}
