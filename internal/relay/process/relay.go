// Package process runs the relay in one process: the slots of a watcher, and with them the
// heartbeat, the listeners, health and figures. It starts the parts in the direction of the flow and
// stops them in reverse.
//
// Run blocks until its context ends. It returns early only if the configuration can never work.
package process

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/outrelay/outrelay/internal/base/health"
	"github.com/outrelay/outrelay/internal/base/metrics"
	"github.com/outrelay/outrelay/internal/base/systemd"
	"github.com/outrelay/outrelay/internal/contract/config"
	"github.com/outrelay/outrelay/internal/contract/routing"
	"github.com/outrelay/outrelay/internal/contract/slot"
	"github.com/outrelay/outrelay/internal/kafkawire"
	"github.com/outrelay/outrelay/internal/relay/changes"
	"github.com/outrelay/outrelay/internal/relay/connect"
	"github.com/outrelay/outrelay/internal/relay/internal/pipeline"
	"github.com/outrelay/outrelay/internal/relay/internal/sink"
	"github.com/outrelay/outrelay/internal/relay/internal/slots"
	"github.com/outrelay/outrelay/internal/relay/internal/term"
	"github.com/outrelay/outrelay/internal/relay/notices"
	"github.com/outrelay/outrelay/internal/relay/probes"
	"github.com/outrelay/outrelay/internal/relay/readiness"
	"github.com/outrelay/outrelay/internal/relay/stored/divisions"
	"github.com/outrelay/outrelay/internal/relay/stored/nodes"
	"github.com/outrelay/outrelay/internal/relay/stored/outboxes"
	"github.com/outrelay/outrelay/internal/relay/stored/state"
	"github.com/outrelay/outrelay/internal/relay/tracing"
)

// Relay runs one watcher in this process: the only slot of the watcher, which is the default, or
// its share of several slots (N28).
type Relay struct {
	cfg       config.Config
	log       *slog.Logger
	metrics   *metrics.Set
	shared    *term.Shared
	slots     []*term.Runner
	member    *nodes.Member
	counts    *countLoop
	embedded  bool
	host      Host
	operators atomic.Pointer[Listener] // nil until it is bound
	// buildOperators binds the operators' page and API. It is nil in programs that do not contain
	// them.
	buildOperators func(config.Config, string, *slog.Logger, *metrics.Set) (Listener, error)
}

// Option changes the behavior of a relay outside of its work.
type Option func(*Relay)

// Listener is a server that runs with the relay. The caller must call Run or Close.
type Listener interface {
	Addr() string
	Run(ctx context.Context) error
	Close() error
	// Reload uses what may change without a restart, and returns the keys that it has applied.
	Reload(a *config.Admin) (applied []string)
}

// WithOperators makes the relay serve the operators' page and API if http.admin is set. Without
// this option, New returns an error if http.admin is set. build binds the address. A program that
// does not pass build does not link page and API.
func WithOperators(build func(config.Config, string, *slog.Logger, *metrics.Set) (Listener, error)) Option {
	return func(relay *Relay) { relay.buildOperators = build }
}

// Host has the values that a program in which the relay is embedded passes to it. All are optional.
type Host struct {
	Mongo connect.MongoHost
	Kafka connect.KafkaHost
	Route func(aggregateType, typ string) []string // see [routing.Config.Choose]
	Hooks notices.Hooks
}

// ErrNoOperators is the error of http.admin in a program without the operators' page.
var ErrNoOperators = errors.New("http.admin.listen: this program has no listener for the operators' page and API: " +
	"set it to off and mount operate.Operator.Handler, or remove http.admin and start `outrelay run` with `tasks: [admin]` in another process")

// Key is an argument of the function that only packages of this module call: other modules cannot name it. See relay.Relay.Parts.
type Key struct{}

// Parts are the values of an embedded relay from which the operators' API of the service is made.
type Parts struct {
	Config  config.Config
	Host    Host
	Version string
	Log     *slog.Logger
}

// EmbeddedIn is for a relay inside another program. The relay does not notify the service manager: that is
// up to the program.
func EmbeddedIn(host Host) Option {
	return func(relay *Relay) { relay.embedded, relay.host = true, host }
}

// New builds a relay, whose clients connect to MongoDB in the background. All its errors are errors of the
// configuration. The caller must call Run or Close.
func New(cfg config.Config, version string, log *slog.Logger, options ...Option) (*Relay, error) {
	relay := &Relay{cfg: cfg, log: log}
	for _, o := range options {
		o(relay)
	}
	if relay.servesOperators() && relay.buildOperators == nil {
		return nil, ErrNoOperators
	}

	parts := slot.Ranges(cfg.Slots)
	// With one slot, the metrics have no label for it.
	var sets []*metrics.Set
	if len(parts) == 1 {
		relay.metrics = metrics.New(version)
		sets = []*metrics.Set{relay.metrics}
	} else {
		names := make([]string, len(parts))
		for i, p := range parts {
			names[i] = p.String()
		}
		relay.metrics, sets = metrics.NewForSlots(version, names)
	}

	var err error
	if relay.shared, err = newShared(cfg, relay.host, version, log, relay.metrics); err != nil {
		return nil, err
	}
	relay.member = relay.newMember(state.Open(relay.shared.Mongo.State, cfg.State))
	relay.counts = &countLoop{relay: relay, counter: relay.newCounter(), judge: new(health.Evaluator)}
	for i, p := range parts {
		relay.slots = append(relay.slots, term.NewRunner(relay.shared, p, sets[i]))
	}
	return relay, nil
}

// newShared returns the parts that the slots share.
func newShared(
	cfg config.Config, host Host, version string, log *slog.Logger, metricSet *metrics.Set,
) (shared *term.Shared, err error) {
	shared = &term.Shared{
		Config:  cfg,
		Log:     log,
		Version: version,
		State:   readiness.NewState(cfg.HTTP.Readiness, time.Now, log),
		Pool:    pipeline.NewPool(int64(cfg.Limits.Memory), cfg.Limits.Tickets),
		Pace:    term.DefaultPace,
		Hooks:   host.Hooks,
	}
	if shared.Scope, err = changes.ParseScope(cfg.Watch, cfg.State.Pattern()); err != nil {
		return nil, fmt.Errorf("watch: %w", err)
	}
	if shared.Router, err = connect.Router(cfg, host.Route); err != nil {
		return nil, err
	}
	shared.Mapping = cfg.DocumentMapping()
	if shared.Preset, err = routing.NewPreset(cfg.Preset()); err != nil {
		return nil, fmt.Errorf("record: %w", err)
	}

	if shared.Kafka, err = connect.NewKafka(cfg, host.Kafka, log, metricSet); err != nil {
		return nil, err
	}
	if shared.Sinks, err = newSinks(cfg, shared.Kafka, log, metricSet); err != nil {
		return nil, err
	}
	if shared.Exporter, err = newExporter(cfg, version, metricSet, log); err != nil {
		return nil, err
	}
	// The clients of MongoDB connect at once, so no error may follow.
	if shared.Mongo, err = connect.NewClients(cfg.MongoDB, host.Mongo, cfg.Node, cfg.Slots, log, metricSet); err != nil {
		return nil, err
	}

	db := state.Open(shared.Mongo.State, cfg.State)
	shared.Nodes = nodes.NewNodes(db.Collection("nodes"))
	shared.Registry = outboxes.NewRegistry(db.Collection("collections"))
	shared.Divisions = divisions.New(db)
	if cfg.Slots > 1 && cfg.HasTask(config.TaskRelay) {
		shared.Balancer = slots.NewBalancer(cfg, db, shared.Nodes)
	}
	return shared, nil
}

// Run delivers until ctx ends, then drains and releases within the configured time. It closes the
// relay before it returns.
func (r *Relay) Run(ctx context.Context) error {
	// The parts outlive ctx: they have to work until the slots have drained.
	work, cancel := context.WithCancel(context.WithoutCancel(ctx))
	defer cancel()
	defer r.closeClients(work)
	operators, err := r.listenOperators()
	if err != nil {
		return err
	}

	group, work := errgroup.WithContext(work)
	if r.cfg.HTTP.Listen != "off" {
		srv, err := probes.Listen(r.cfg.HTTP.Listen, r.processHealth(), r.metrics.Registry, r.log)
		if err != nil {
			if operators != nil {
				err = errors.Join(err, operators.Close())
			}
			return err
		}
		group.Go(func() error { return srv.Run(work) })
	}
	if operators != nil {
		group.Go(func() error { return operators.Run(work) })
	}

	group.Go(func() error { return r.shared.Exporter.Run(work) })
	if !r.embedded {
		group.Go(func() error { return systemd.New(r.cfg.Watcher, r.processHealth(), r.log).Run(ctx, work) })
	}

	group.Go(func() error {
		// All other goroutines end when the slots have stopped.
		defer cancel()
		if err := r.checkHostClient(ctx); err != nil {
			return err
		}
		// A program that runs `outrelay run` has checked this before, with its causes.
		if r.embedded && r.cfg.HasTask(config.TaskRelay) {
			if err := connect.RequireRights(ctx, r.cfg, r.shared.Scope, r.shared.Mongo.State); err != nil {
				return err
			}
		}
		// Nothing may be written before the state database is known to be the relay's.
		if err := r.prepareState(ctx); err != nil || ctx.Err() != nil {
			return err
		}
		group.Go(func() error { return r.counts.runFacts(work) })
		group.Go(func() error { return r.counts.runCounts(work) })
		group.Go(func() error { return r.recordHistory(work) })
		group.Go(func() error { return r.runHeartbeat(work) })

		if !r.cfg.HasTask(config.TaskRelay) {
			// A process without the task relay never acquires the lease.
			r.shared.State.SetPhase(readiness.PhaseAdmin)
			<-ctx.Done()
			return nil
		}
		return r.ownSlots(ctx, work)
	})

	if err := group.Wait(); err != nil && !errors.Is(err, context.Canceled) {
		return err
	}
	return nil
}

// servesOperators reports whether this process has to serve the operators' page and API.
func (r *Relay) servesOperators() bool {
	admin := r.cfg.HTTP.Admin
	return admin != nil && !admin.IsOff() && r.cfg.HasTask(config.TaskAdmin)
}

// listenOperators binds the listener of the operators' page and API. It returns nil if they are not
// configured.
func (r *Relay) listenOperators() (Listener, error) {
	if !r.servesOperators() {
		return nil, nil
	}
	listener, err := r.buildOperators(r.cfg, r.shared.Version, r.log, r.metrics)
	if err != nil {
		return nil, err
	}
	r.log.Info("the operator's page and API are served", "address", listener.Addr())
	r.operators.Store(&listener)
	return listener, nil
}

// Ready returns the readiness, the phase and the problems of the process, as /readyz does.
func (r *Relay) Ready() (ok bool, phase readiness.Phase, reasons []string) {
	ok, as, reasons := r.processHealth().Ready()
	return ok, readiness.Phase(as), reasons
}

// Handler returns a handler that serves /livez, /readyz and /metrics of the relay that current returns. While it
// returns nil, the process is live and not ready, and has no metrics.
func Handler(current func() *Relay, log *slog.Logger) http.Handler {
	gatherer := metrics.GatherFrom(func() *metrics.Set {
		if relay := current(); relay != nil {
			return relay.metrics
		}
		return nil
	})
	return probes.Handler(lateHealth(current), gatherer, log)
}

// Close closes the connections of a relay that is never run. Run closes them itself.
func (r *Relay) Close() { r.closeClients(context.Background()) }

func (r *Relay) closeClients(ctx context.Context) {
	r.shared.Kafka.Close()
	r.shared.Mongo.Disconnect(ctx)
}

// ownSlots runs every slot, within this node's share of them, until stop ends.
func (r *Relay) ownSlots(stop, work context.Context) error {
	work, cancel := context.WithCancel(work)
	defer cancel()

	// With several slots, the state of the process is only standby. Each slot has its own state.
	var sharing errgroup.Group
	if r.shared.Balancer != nil {
		r.shared.State.SetPhase(readiness.PhaseStandby)
		sharing.Go(func() error { return r.shared.Balancer.Run(stop, work, r) })
	}

	var owners errgroup.Group
	for _, one := range r.slots {
		owners.Go(func() error { return one.OwnSlot(stop, work) })
	}
	err := owners.Wait()
	cancel()
	return errors.Join(err, sharing.Wait())
}

// activeSlots returns the slots that deliver now.
func (r *Relay) activeSlots() (list []*term.Runner) {
	for _, one := range r.slots {
		if one.IsDelivering() {
			list = append(list, one)
		}
	}
	return list
}

// ReportSharing implements slots.Process.
func (r *Relay) ReportSharing(err error) {
	if err != nil {
		err = fmt.Errorf("the slots cannot be shared: %w", err)
	}
	r.shared.State.SetError("slots", err)
}

// IsHalted implements slots.Process.
func (r *Relay) IsHalted(i int) bool {
	_, phase, _ := r.slots[i].State.Ready()
	return phase == string(readiness.PhaseHalted)
}

// RequestHandOver implements slots.Process.
func (r *Relay) RequestHandOver(i int, reason string) bool { return r.slots[i].RequestHandOver(reason) }

// newSinks returns the opener of the relay's sinks. It does no I/O.
func newSinks(cfg config.Config, client *kafkawire.Client, log *slog.Logger, metricSet *metrics.Set) (*sink.Opener, error) {
	common := sink.Config{
		Compression:       cfg.Kafka.Compression,
		RequestTimeout:    cfg.Kafka.RequestTimeout,
		RequestsPerBroker: cfg.Kafka.RequestsPerBroker,
		ParkBytes:         int64(cfg.Limits.Memory),
		Log:               log,
		Metrics:           metricSet,
	}

	if create := cfg.Topics.Create; create != nil {
		common.Create = &kafkawire.TopicCreate{
			Partitions:  create.Partitions,
			Replication: create.Replication,
			Configs:     create.Configs,
		}
	}

	return sink.NewOpener(common, client)
}

var _ pipeline.Follower = (*tracing.Delivery)(nil)

// newExporter returns the exporter of the configured collector, or nil if no collector is
// configured.
func newExporter(cfg config.Config, version string, set *metrics.Set, log *slog.Logger) (*tracing.Exporter, error) {
	tls, err := cfg.OTel.TLS.ClientConfig()
	if err != nil {
		return nil, fmt.Errorf("otel.tls: %w", err)
	}

	telemetry := &set.Telemetry
	exporter, err := tracing.New(tracing.Config{
		Endpoint:        cfg.OTel.Endpoint.Reveal(),
		Token:           cfg.OTel.Token.Reveal(),
		TLS:             tls,
		SamplePercent:   cfg.OTel.SamplePercent,
		SpansPerSecond:  cfg.OTel.SpansPerSecond,
		MetricsInterval: cfg.OTel.MetricsInterval,
		Version:         version,
		Node:            cfg.Node,
		Watcher:         cfg.Watcher,
		Gatherer:        set.Registry,
		Log:             log,
		OnLimited:       telemetry.Limited.Inc,
		OnExport: func(signal string, err error) {
			result := "ok"
			if err != nil {
				result = "failed"
			}
			telemetry.Exports.WithLabelValues(signal, result).Inc()
		},
	})
	if err != nil {
		return nil, fmt.Errorf("otel: %w", err)
	}
	return exporter, nil
}
