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
	"github.com/outrelay/outrelay/internal/httpapi"
	"github.com/outrelay/outrelay/internal/kafka"
	"github.com/outrelay/outrelay/internal/metrics"
	"github.com/outrelay/outrelay/internal/migrate"
	"github.com/outrelay/outrelay/internal/nodes"
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

	state          *state
	clock          serverClock
	mongo          *clients
	kafka          *kafka.Client
	nodes          *store.Nodes
	member         *nodes.Member
	steps          []migrate.Step // nil are those of this version
	registry       *store.Registry
	divisions      *store.Divisions
	kafkaReachable atomic.Bool  // Kafka answered the last heartbeat's question
	lastAck        atomic.Int64 // when Kafka acked last, Unix nanoseconds
	scope          *changestream.Scope
	router         *routing.Router
	preset         *routing.Preset
	slots          []*runner
	balancer       *slotBalancer     // nil for one slot
	pool           *dispatch.Pool    // the memory that the slots of this process share
	exporter       *tracing.Exporter // nil unless configured
	figures        *figures
	embedded       bool
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

// Embedded is for a relay in another's program: what a service manager is told of the process is that program's affair.
func Embedded() Option { return func(r *Relay) { r.embedded = true } }

// New builds a relay; it does no I/O. Every error it returns is one of the configuration. One that is never run is to be
// closed.
func New(cfg config.Config, version string, log *slog.Logger, options ...Option) (*Relay, error) {
	r := &Relay{cfg: cfg, log: log, version: version, state: newState(cfg.HTTP.Readiness, time.Now), pace: defaultPace}
	for _, o := range options {
		o(r)
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
	if r.scope, err = changestream.ParseScope(cfg.Watch, stateCollections(cfg)...); err != nil {
		return nil, fmt.Errorf("watch: %w", err)
	}
	if r.router, err = routing.New(cfg.Routing()); err != nil {
		return nil, fmt.Errorf("topics: %w", err)
	}
	if r.preset, err = routing.NewPreset(cfg.Preset()); err != nil {
		return nil, fmt.Errorf("record: %w", err)
	}
	if r.mongo, err = newClients(cfg.MongoDB, cfg.Node, len(parts), log, r.metrics); err != nil {
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
		r.balancer = newSlotBalancer(r)
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
	defer r.closeClients(work)
	operators, err := r.listenOperators()
	if err != nil {
		return err
	}
	g, work := errgroup.WithContext(work)
	if r.cfg.HTTP.Listen != "off" {
		srv, err := httpapi.Listen(r.cfg.HTTP.Listen, r.processHealth(), r.metrics.Registry, r.log)
		if err != nil {
			return errors.Join(fmt.Errorf("http.listen: %w", err), operators.Close())
		}
		g.Go(func() error { return srv.Run(work) })
	}
	if operators != nil {
		g.Go(func() error { return operators.Run(work) })
	}
	g.Go(func() error { return r.exporter.Run(work) })
	g.Go(func() error { return r.figures.countPeriodically(work) })
	g.Go(func() error { return r.runHeartbeat(work) })
	if !r.embedded {
		g.Go(func() error { return systemd.New(r.cfg.Watcher, r.processHealth(), r.log).Run(ctx, work) })
	}
	g.Go(func() error {
		defer cancel()
		if !r.cfg.Is(config.RoleRelay) {
			return r.waitWithoutWatcher(ctx)
		}
		if err := r.waitForUpgrade(ctx); err != nil {
			return err
		}
		return r.ownSlots(ctx, work)
	})
	if err := g.Wait(); err != nil && !errors.Is(err, context.Canceled) {
		return err
	}
	return nil
}

// Handler serves /livez, /readyz and /metrics, whatever http.listen says.
func (r *Relay) Handler() http.Handler {
	return httpapi.Handler(r.processHealth(), r.metrics.Registry, r.log)
}

// Ready says what the process does for its watcher and what is wrong, as /readyz does.
func (r *Relay) Ready() (ok bool, role Role, reasons []string) {
	ok, as, reasons := r.processHealth().Ready()
	return ok, Role(as), reasons
}

// Close frees what New made. Run does it by itself.
func (r *Relay) Close() { r.closeClients(context.Background()) }

func (r *Relay) closeClients(ctx context.Context) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 2*time.Second)
	defer cancel()
	r.kafka.Close()
	r.mongo.disconnect(ctx)
}

// ownSlots runs every slot, as the node's share of them allows, until stop ends.
func (r *Relay) ownSlots(stop, work context.Context) error {
	work, cancel := context.WithCancel(work)
	defer cancel()
	var sharing errgroup.Group
	if r.balancer != nil {
		r.state.setRole(RoleStandby) // its slots tell what it does
		sharing.Go(func() error { return r.balancer.shareSlots(stop, work) })
	}
	var owners errgroup.Group
	for _, one := range r.slots {
		owners.Go(func() error { return one.ownSlot(stop, work) })
	}
	err := owners.Wait()
	cancel()
	return errors.Join(err, sharing.Wait())
}

// activeTerms are the terms that deliver now.
func (r *Relay) activeTerms() (list []*term) {
	for _, one := range r.slots {
		if t := one.current.get(); t != nil {
			list = append(list, t)
		}
	}
	return list
}

// stateCollections are never watched, whatever the pattern (N27).
func stateCollections(cfg config.Config) []string {
	return []string{cfg.MongoDB.State + ".*"}
}
