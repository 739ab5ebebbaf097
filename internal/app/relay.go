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
	"slices"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/outrelay/outrelay/internal/changestream"
	"github.com/outrelay/outrelay/internal/config"
	"github.com/outrelay/outrelay/internal/health"
	"github.com/outrelay/outrelay/internal/httpapi"
	"github.com/outrelay/outrelay/internal/kafka"
	"github.com/outrelay/outrelay/internal/lease"
	"github.com/outrelay/outrelay/internal/metrics"
	"github.com/outrelay/outrelay/internal/migrate"
	"github.com/outrelay/outrelay/internal/nodes"
	"github.com/outrelay/outrelay/internal/retry"
	"github.com/outrelay/outrelay/internal/routing"
	"github.com/outrelay/outrelay/internal/store"
	"github.com/outrelay/outrelay/internal/systemd"
	"github.com/outrelay/outrelay/internal/tracing"
)

// Slot is the one slot of a watcher that is not split (N28).
const Slot = "0of1"

// Relay runs one watcher in this process.
type Relay struct {
	cfg     config.Config
	log     *slog.Logger
	metrics *metrics.Set
	version string

	state     *state
	clock     serverClock
	mongo     *clients
	kafka     *kafka.Client
	lease     *lease.Lease
	nodes     *store.Nodes
	member    *nodes.Member
	steps     []migrate.Step // nil are those of this version
	events    *store.Events
	registry  *store.Registry
	reachable atomic.Bool  // Kafka answered the last heartbeat's question
	acked     atomic.Int64 // when Kafka acked last, Unix nanoseconds
	scope     *changestream.Scope
	router    *routing.Router
	preset    *routing.Preset
	fenced    []time.Time // when Kafka fenced this owner although it held the lease (N5)
	stepped   time.Time   // when it last stepped down for lack of progress (N6)
	running   running
	exporter  *tracing.Exporter // nil unless configured
	tap       *tracing.Tap
	figures   *figures
}

// New builds a relay; it does no I/O. Every error it returns is one of the configuration.
func New(cfg config.Config, version string, log *slog.Logger) (*Relay, error) {
	r := &Relay{cfg: cfg, log: log, metrics: metrics.New(version), version: version}
	r.state = newState(cfg.HTTP.Readiness, time.Now)
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
	if r.mongo, err = connect(cfg.MongoDB, cfg.Node, log); err != nil {
		return nil, err
	}
	if r.kafka, err = NewKafka(cfg, log, r.metrics); err != nil {
		return nil, err
	}
	db := r.mongo.state.Database(cfg.MongoDB.State)
	r.nodes, r.registry = store.NewNodes(db.Collection("nodes")), store.NewRegistry(db.Collection("collections"))
	r.member = r.newMember(db)
	r.events = store.NewEvents(db.Collection("events"), cfg.Watcher, cfg.Node)
	r.lease, err = lease.New(lease.Config{
		Collection: db.Collection("watchers"), ID: cfg.Watcher + "/" + Slot,
		Node: cfg.Node, Address: cfg.Address, Version: version,
		TTL: cfg.Lease.TTL, Renew: cfg.Lease.Renew, CheckpointEvery: min(cfg.Checkpoint, cfg.Lease.Renew),
		NodeAlive: r.alive, Log: log, Metrics: r.metrics,
	})
	if err != nil {
		return nil, err
	}
	if r.exporter, err = newExporter(cfg, version, r); err != nil {
		return nil, err
	}
	r.tap = newTap(r.exporter, r.metrics, &r.clock)
	r.figures = &figures{Relay: r, judge: new(health.Evaluator)}
	r.gauges()
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
		srv, err := httpapi.Listen(r.cfg.HTTP.Listen, r.state, r.metrics.Registry, r.log)
		if err != nil {
			return errors.Join(fmt.Errorf("http.listen: %w", err), operators.Close())
		}
		g.Go(func() error { return srv.Run(work) })
	}
	if operators != nil {
		g.Go(func() error { return operators.Run(work) })
	}
	g.Go(func() error { return r.exporter.Run(work) })
	g.Go(func() error { return r.figures.run(work) })
	g.Go(func() error { return r.beat(work) })
	g.Go(func() error { return systemd.New(r.cfg.Watcher, r.state, r.log).Run(ctx, work) })
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

func (r *Relay) close(ctx context.Context) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 2*time.Second)
	defer cancel()
	r.kafka.Close()
	r.mongo.close(ctx)
}

// own holds the lease, again and again, until stop ends.
func (r *Relay) own(stop, work context.Context) error {
	backoff := retry.Reopen.Start()
	for stop.Err() == nil {
		r.state.setRole(RoleStandby)
		held, err := r.lease.Acquire(stop)
		if err != nil {
			if stop.Err() != nil {
				return nil
			}
			r.report("lease", err, true)
			if retry.Sleep(stop, configRetry) != nil {
				return nil
			}
			continue
		}
		r.state.clear("lease")
		began := time.Now()
		err = r.serve(stop, work, held)
		if err == nil || stop.Err() != nil {
			return nil
		}
		if time.Since(began) > time.Minute {
			backoff.Reset()
		}
		if again, halt := r.ended(stop, err); halt != nil {
			r.haltWithout(stop, halt)
			return nil
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

// ended says why a term ended, and reports whether the lease may be sought again at once, or not at all.
func (r *Relay) ended(stop context.Context, err error) (again bool, halt *HaltError) {
	switch {
	case errors.Is(err, lease.ErrLeaseLost):
		r.tellLost(stop, err)
		return true, nil
	case errors.Is(err, errStepDown):
		r.log.Info("stepped down", "reason", err)
		return true, nil
	case errors.Is(err, kafka.ErrBroken):
		r.log.Warn("Kafka forgot the producer's sequence; taking over anew with a read-back", "reason", err)
		return false, nil // after a wait: an answer that persists must not burn producer epochs
	case errors.Is(err, kafka.ErrFenced):
		r.log.Warn("Kafka fenced this owner although it holds the lease; taking over anew", "reason", err)
		return true, r.fencedAgain(time.Now(), err)
	}
	r.log.Error("the term ended; trying again", "reason", err)
	return false, nil
}

const (
	fencedLimit = 3
	fencedSpan  = time.Minute
)

// fencedAgain is N5's limit: somebody else uses the transactional id, and taking it from each other for ever helps nobody.
func (r *Relay) fencedAgain(now time.Time, err error) *HaltError {
	r.fenced = slices.DeleteFunc(append(r.fenced, now), func(t time.Time) bool { return now.Sub(t) > fencedSpan })
	if len(r.fenced) < fencedLimit {
		return nil
	}
	return &HaltError{
		What: fmt.Sprintf("Kafka fenced the owner of watcher %s %d times within %s while it held the lease: another program uses its transactional id", r.cfg.Watcher, fencedLimit, fencedSpan),
		Err:  err,
		Fix:  "find the other program (was the state database copied to another cluster?), then start this process again",
	}
}

// haltWithout waits for stop without the lease.
func (r *Relay) haltWithout(stop context.Context, halt *HaltError) {
	r.state.setRole(RoleHalted)
	r.report("halted", halt, true)
	<-stop.Done()
}

// report tells of a problem once, not at each attempt.
func (r *Relay) report(part string, err error, fatal bool) {
	if r.state.set(part, err.Error(), fatal) {
		r.log.Error(part+": "+err.Error(), "part", part)
	}
}

// ownCollections are never watched, whatever the pattern (N27).
func ownCollections(cfg config.Config) []string {
	return []string{cfg.MongoDB.State + ".*"}
}
