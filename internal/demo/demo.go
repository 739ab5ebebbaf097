package demo

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
	"go.mongodb.org/mongo-driver/v2/mongo/writeconcern"

	"github.com/outrelay/outrelay/internal/demo/check"
	"github.com/outrelay/outrelay/internal/devstack"
)

// DefaultRate is how many events a second the sample service appends unless Options say otherwise.
const DefaultRate = 400

const (
	partitions = 6
	remember   = 10 * time.Minute // a second delivery later than this is called a phantom
	stopTime   = 10 * time.Second // for clean-up after the end of the context
)

// Options of a run.
type Options struct {
	Binary    string        // the program whose `run` is the relay
	Env       []string      // of the relays; what begins with OUTRELAY_ is left out
	Rate      int           // events a second. Defaults to DefaultRate; lower where two kills would not fall into the run
	Events    int           // ends after that many; 0 goes on until the user quits
	KillEvery time.Duration // kills the owner in that rhythm, or in scenario consumer one of the consumers; 0 never does
	// RebalanceEvery makes one more consumer join the group and leave it in that rhythm. For scenario consumer only.
	RebalanceEvery time.Duration
	Keep           bool // leaves relays and servers up at the end, until the context ends

	Out      io.Writer    // where people read
	Terminal *Terminal    // nil writes plain lines and takes no keys
	Result   func(Result) // called once, when the figures are final and before anything is stopped. Optional
	// Stopper is given what ends the servers at once, for a process that must end now. Optional.
	Stopper func(stop func())
}

// demo is one run.
type demo struct {
	o       Options
	v       *view
	stack   *devstack.Stack
	names   names
	made    []string // topics
	broken  bool     // a promise: what the servers hold shows how
	client  *mongo.Client
	relays  *relays
	follow  *follower
	check   *check.Checker
	latency *check.Latency
	service *service
	dying   atomic.Bool // the process ends at once

	mu       sync.Mutex
	first    int64     // epoch of the first owner
	last     ownership // of the newest epoch
	told     int64     // epoch whose take-over was told
	since    time.Time // when the owner was made to end; zero after the take-over was told
	kills    int
	twoKills chan struct{} // closed at the second

	set     map[string]any // sections of the relays' configuration
	flagged bool           // records that say that they repeat an earlier one are no duplicates

	delivered int // at the last drawing
	drawnAt   time.Time
	rate      float64
}

// Run runs the demo and returns what it found. An error is one of the surroundings: servers that cannot be had, a relay
// that does not start; broken promises are in the Result.
func Run(ctx context.Context, o Options) (Result, error) {
	if o.Rate == 0 {
		o.Rate = DefaultRate
	}
	d := newDemo(o)
	defer o.Terminal.Restore()
	defer d.v.done()
	d.v.line("outrelay dev · real MongoDB and Kafka on this machine, nothing to install")
	if err := d.boot(ctx, devstack.Options{Mongods: 1, Brokers: 1, Env: true}); err != nil {
		return Result{}, err
	}
	defer d.stack.Stop()
	// A service of the user's own may write to topics that do not exist yet.
	d.set = map[string]any{"topics": map[string]any{"template": d.names.topic("{aggregatetype}"), "create": map[string]any{}}}
	if err := d.connect(ctx); err != nil {
		return Result{}, err
	}
	defer d.disconnect(ctx)
	if err := d.prepare(ctx); err != nil {
		return Result{}, err
	}
	return d.run(ctx)
}

func newDemo(o Options) *demo {
	d := &demo{o: o, names: ownNames(), v: newView(o.Out, o.Terminal), latency: check.NewLatency(), twoKills: make(chan struct{})}
	d.check = check.New(check.Options{Forget: remember, Latency: d.latency, Others: o.Keep})
	return d
}

// boot starts the servers, or takes those that the environment names.
func (d *demo) boot(ctx context.Context, o devstack.Options) error {
	o.Progress = d.progress
	stack, err := devstack.Start(ctx, o)
	if err != nil && ctx.Err() != nil {
		return fmt.Errorf("starting the servers: %w", context.Cause(ctx))
	}
	if err != nil {
		return err
	}
	if d.o.Stopper != nil {
		d.o.Stopper(func() { d.dying.Store(true); d.o.Terminal.Restore(); stack.Stop() })
	}
	d.stack = stack
	if given(stack) {
		d.names = namesAmongOthers()
	}
	d.servers()
	return nil
}

// progress shows how the servers come up.
func (d *demo) progress(p devstack.Progress) {
	if p.Stage == devstack.Starting || p.Stage == devstack.Ready {
		return // told when all are ready
	}
	d.v.figures("  " + p.String())
}

// servers says what runs.
func (d *demo) servers() {
	for _, s := range d.stack.Servers() {
		note := "rs0"
		if s.Name == "Kafka" {
			note = fmt.Sprintf("%d partitions", partitions)
		}
		d.v.line("  %-17s ready  %-21s %-12s (%s)  %.1f s", s.Name+" "+s.Version, strings.Join(s.Addrs, ","), note, s.Origin, s.StartedIn.Seconds())
	}
}

func (d *demo) connect(ctx context.Context) error {
	client, err := mongo.Connect(options.Client().ApplyURI(d.stack.MongoURI()).SetWriteConcern(writeconcern.Majority()).SetAppName("outrelay-dev"))
	if err != nil {
		return fmt.Errorf("connecting to MongoDB: %w", err)
	}
	d.client = client
	d.follow = &follower{coll: d.state().Collection("watchers"), acquired: d.acquired}
	if d.relays, err = newRelays(d.stack, d.names, d.o.Binary, d.o.Env, d.set); err != nil {
		return err
	}
	rate := rateFor(d.o.Rate, d.o.Events, d.o.KillEvery)
	if rate < d.o.Rate {
		d.v.line("  pace              %d events/s, so that at least two kills fall into %s events", rate, thousands(d.o.Events))
	}
	d.service, err = newService(client, d.names, d.check, rate, d.o.Events)
	if d.service != nil && d.o.KillEvery > 0 {
		d.service.hold = d.untilTwoKills
	}
	return err
}

// disconnect ends what connect began, and leaves nothing on servers that stay.
func (d *demo) disconnect(ctx context.Context) {
	d.tidy(ctx)
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), stopTime)
	defer cancel()
	_ = d.client.Disconnect(ctx)
}

// prepare makes the collections and the topic.
func (d *demo) prepare(ctx context.Context) error {
	if err := d.service.prepare(ctx); err != nil {
		return err
	}
	return d.createTopic(ctx, aggregate)
}

// run starts what flows, watches it and stops it again: the consumer last.
func (d *demo) run(ctx context.Context) (Result, error) {
	watch, stopWatching := context.WithCancel(context.WithoutCancel(ctx))
	var wg sync.WaitGroup
	defer func() { stopWatching(); wg.Wait() }()
	wg.Go(func() { d.follow.Run(watch) })
	wg.Go(func() { devstack.Tail(watch, d.stack.Brokers(), []string{d.names.topic(aggregate)}, d.consume) })
	defer func() { d.v.done(); d.relays.stop(stopWithin) }()
	if err := d.startRelays(ctx); err != nil {
		return Result{}, err
	}
	if err := d.page(watch, &wg); err != nil {
		return Result{}, err
	}
	err := d.loop(ctx)
	d.v.done()
	d.o.Terminal.Restore()
	d.follow.look(watch)
	d.mu.Lock()
	takeovers := int(d.last.epoch - d.first)
	d.mu.Unlock()
	res := newResult(d.check.Report(), d.latency.Figures(), takeovers)
	if d.o.Events > res.Events {
		res.Broken = errors.Join(res.Broken, fmt.Errorf("%d of %d events were appended", res.Events, d.o.Events))
	}
	d.broken = res.Err() != nil
	d.v.line(" %s", res.summary())
	if d.o.Result != nil && err == nil {
		d.o.Result(res)
	}
	if d.o.Keep && err == nil && ctx.Err() == nil {
		d.connections()
		d.v.line(" all stays up until Ctrl-C")
		<-ctx.Done()
	}
	return res, err
}

// consume is the consumer.
func (d *demo) consume(m devstack.Message) {
	d.check.Delivered(check.Delivery{
		ID: m.Header("id"), Key: string(m.Key), Topic: m.Topic, Partition: m.Partition, Offset: m.Offset, Value: m.Value,
		Flagged: d.flagged && m.Header("outrelay-redelivered") == "true", Seen: m.Seen,
	})
}

// startRelays starts the owner and, once it works, its standby.
func (d *demo) startRelays(ctx context.Context) error {
	owner, err := d.relays.spawn()
	if err != nil {
		return err
	}
	if err := d.relays.await(ctx, owner, "take over", func() bool { return d.relays.role(ctx, owner) == "owner" && d.follow.owner().node == owner.node }); err != nil {
		return err
	}
	standby, err := d.relays.spawn()
	if err != nil {
		return err
	}
	if err := d.relays.await(ctx, standby, "stand by", func() bool { return d.relays.role(ctx, standby) == "standby" }); err != nil {
		return err
	}
	d.v.line("  watcher %q     owner %s · epoch %d · standby %s", watcher, owner.node, d.follow.owner().epoch, standby.node)
	d.v.line("  metrics           http://%s/metrics", owner.http)
	if d.o.Keep && d.o.Events == 0 {
		d.connections()
	}
	return nil
}

// connections says how to look at what runs.
func (d *demo) connections() {
	d.v.line("  MongoDB           %s", d.stack.MongoURI())
	d.v.line("  Kafka             %s", strings.Join(d.stack.Brokers(), ","))
	for _, x := range d.relays.all() {
		d.v.line("  relay %-11s pid %d  http://%s/readyz", x.node, x.prog.PID(), x.http)
	}
	d.v.line("  try")
	d.v.line("    %s status --config %s", d.o.Binary, d.relays.config)
	d.v.line("    mongosh '%s' --eval 'db.getSiblingDB(\"%s\").outbox.findOne()'", d.stack.MongoURI(), d.names.database)
	d.v.line("    kafka-console-consumer.sh --bootstrap-server %s --topic %s --from-beginning", d.stack.Brokers()[0], d.names.topic(aggregate))
}
