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

	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/lab/demo/check"
	"github.com/outrelay/outrelay/internal/lab/devstack"
	"github.com/outrelay/outrelay/internal/mongodb/concern"
)

// DefaultRate is the default rate of the sample service, in events per second.
const DefaultRate = 400

const (
	partitions     = 6
	forgetAfter    = 10 * time.Minute // a later second delivery counts as a phantom
	cleanupTimeout = 10 * time.Second // for clean-up after the end of the context
)

// Options of a run.
type Options struct {
	Binary string   // the program whose command run is the relay
	Env    []string // of the relays; variables that begin with OUTRELAY_ are removed
	// Settings are settings of the relays, each as path=value. See [CheckSettings].
	Settings []string
	// Rate is the rate in events per second. Defaults to DefaultRate. It is reduced if the run would be too
	// short for two kills. Negative means that the service appends only the bursts of the key b.
	Rate      int
	Events    int           // the run ends after this number; 0 means that it ends when the user quits
	KillEvery time.Duration // interval of kills of the owner, or of a consumer in scenario consumer; 0 means no kills
	// RebalanceEvery is the interval in which one more consumer joins or leaves the group. Only for
	// scenario consumer.
	RebalanceEvery time.Duration
	Keep           bool // keeps relays and servers running after the end of the run, until the context ends

	Out      io.Writer    // for people
	Terminal *Terminal    // nil prints plain lines and reads no keys
	Result   func(Result) // called once with the final figures, before anything is stopped. Optional
	// Stopper gets a function that ends the servers immediately, for a process that must end now.
	// Optional.
	Stopper func(stop func())
}

// demo is one run.
type demo struct {
	options       Options
	view          *view
	stack         *devstack.Stack
	names         names
	createdTopics []string
	broken        bool // a promise is broken, so the content of the servers is kept as evidence
	client        *mongo.Client
	relays        *relays
	follow        *follower
	check         *check.Checker
	latency       *check.Latency
	service       *service
	stopping      atomic.Bool // the process ends immediately

	mu            sync.Mutex
	firstEpoch    int64
	lastOwnership ownership // with the highest epoch
	reportedEpoch int64     // its takeover was printed
	outageSince   time.Time // when the owner was made to stop; zero after the takeover was printed
	kills         int
	twoKills      chan struct{} // closed at the second kill

	relayConfig  map[string]any // sections of the relays' configuration
	allowFlagged bool           // records with the redelivered header are not duplicates

	drawnDelivered int // delivered events when the figures were last drawn
	drawnAt        time.Time
	rate           float64
}

// Run runs the demo and returns its result. It returns an error if the environment fails, for
// example if the servers or a relay cannot be started. Broken promises are in the Result.
func Run(ctx context.Context, options Options) (Result, error) {
	if options.Rate == 0 {
		options.Rate = DefaultRate
	}
	demo := newDemo(options)
	defer options.Terminal.Restore()
	defer demo.view.finishStatus()

	demo.view.printLine("outrelay dev · real MongoDB and Kafka on this machine")
	demo.view.printLine("  servers           %s", devstack.DescribeSources())
	if err := demo.startServers(ctx, devstack.Options{Mongods: 1, Brokers: 1, Env: true}); err != nil {
		return Result{}, err
	}
	defer demo.stack.Stop()

	// A service of the user may write to topics that do not exist yet.
	demo.relayConfig = map[string]any{"topics": map[string]any{
		"template": demo.names.topicName("{aggregatetype}"),
		"create":   map[string]any{},
	}}
	if err := demo.connectClients(); err != nil {
		return Result{}, err
	}
	defer demo.closeClients(ctx)

	if err := demo.createOutbox(ctx); err != nil {
		return Result{}, err
	}
	return demo.runToEnd(ctx)
}

func newDemo(options Options) *demo {
	run := &demo{
		options:  options,
		names:    defaultNames(),
		view:     newView(options.Out, options.Terminal),
		latency:  check.NewLatency(),
		twoKills: make(chan struct{}),
	}
	run.check = check.New(check.Options{Forget: forgetAfter, Latency: run.latency, Others: run.hasVisitors()})
	return run
}

// isIdle reports whether the sample service appends nothing on its own.
func (d *demo) isIdle() bool { return d.options.Rate < 0 }

// hasVisitors reports whether services of the user may append events too.
func (d *demo) hasVisitors() bool { return d.options.Keep || d.isIdle() }

// startServers starts the servers, or uses the servers that the environment names.
func (d *demo) startServers(ctx context.Context, options devstack.Options) error {
	if err := reachGiven(ctx, options); err != nil {
		return err
	}
	options.Progress = d.showProgress
	stack, err := devstack.Start(ctx, options)
	// An interrupted start is no failure of the servers.
	if err != nil && ctx.Err() != nil {
		return fmt.Errorf("starting the servers: %w", context.Cause(ctx))
	}
	if err != nil {
		return err
	}

	// The servers are children of this process: even an exit on a second signal has to stop them.
	if d.options.Stopper != nil {
		d.options.Stopper(func() {
			d.stopping.Store(true)
			d.options.Terminal.Restore()
			stack.Stop()
		})
	}
	d.stack = stack
	// Servers that the environment names may hold data of other runs.
	if usesGivenServers(stack) {
		d.names = uniqueNames()
	}
	d.printServers()
	return nil
}

// showProgress shows the progress of the server start.
func (d *demo) showProgress(progress devstack.Progress) {
	// Without a terminal nothing replaces this line, and printServers prints it when all servers are ready.
	if progress.Stage == devstack.Ready && d.view.term == nil {
		return
	}
	d.view.showFigures("  " + progress.String())
}

// printServers prints the servers in place of their progress.
func (d *demo) printServers() {
	d.view.clearStatus()
	for _, s := range d.stack.Servers() {
		note := "rs0"
		if s.Name == "Kafka" {
			note = fmt.Sprintf("%d partitions", partitions)
		}
		d.view.printLine("  %-17s ready  %-21s %-12s (%s)  %.1f s",
			s.Name+" "+s.Version, strings.Join(s.Addrs, ","), note, s.Origin, s.StartedIn.Seconds())
	}
}

// connectClients connects to MongoDB, writes the relays' configuration, and creates the sample
// service.
func (d *demo) connectClients() error {
	client, err := mongo.Connect(options.Client().
		ApplyURI(d.stack.MongoURI()).
		SetWriteConcern(concern.Majority()).
		SetAppName("outrelay-dev"))
	if err != nil {
		return fmt.Errorf("connecting to MongoDB: %w", err)
	}
	d.client = client
	d.follow = &follower{coll: d.stateDatabase().Collection("watchers"), onAcquired: d.recordAcquired}
	d.relays, err = newRelays(d.stack, d.names, d.options.Binary, d.options.Env, d.options.Settings, d.relayConfig)
	if err != nil {
		return err
	}

	// A short run would end before the second kill.
	rate := limitRate(d.options.Rate, d.options.Events, d.options.KillEvery)
	if rate < d.options.Rate {
		d.view.printLine("  pace              %d events/s, so that at least two kills fall into %s events",
			rate, formatThousands(d.options.Events))
	}
	d.service, err = newService(client, d.names, d.check, rate, d.options.Events)
	if d.service != nil && d.options.KillEvery > 0 {
		d.service.beforeLastTenth = d.untilTwoKills
	}
	return err
}

// closeClients undoes connectClients. It leaves nothing on servers that continue to run.
func (d *demo) closeClients(ctx context.Context) {
	d.removeLeftovers(ctx)

	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanupTimeout)
	defer cancel()
	_ = d.client.Disconnect(ctx)
}

// createOutbox creates the collections and the topic.
func (d *demo) createOutbox(ctx context.Context) error {
	if err := d.service.createCollections(ctx); err != nil {
		return err
	}
	return d.createTopic(ctx, aggregate)
}

// runToEnd starts the consumer, the relays and the service, runs them to the end, and stops them.
// The consumer is stopped last.
func (d *demo) runToEnd(ctx context.Context) (Result, error) {
	// The observers outlive ctx: they have to see the end of the relays.
	watch, stopWatching := context.WithCancel(context.WithoutCancel(ctx))
	var wg sync.WaitGroup
	defer func() {
		stopWatching()
		wg.Wait()
	}()
	wg.Go(func() { d.follow.Run(watch) })
	topics := []string{d.names.topicName(aggregate)}
	wg.Go(func() { devstack.Tail(watch, d.stack.Brokers(), topics, d.checkRecord) })
	defer func() {
		d.view.finishStatus()
		d.relays.stopAll(stopWithin)
	}()

	if err := d.startRelays(ctx); err != nil {
		return Result{}, err
	}
	if err := d.servePage(watch, &wg); err != nil {
		return Result{}, err
	}
	d.printReady()

	err := d.runLoop(ctx)
	d.view.finishStatus()
	d.options.Terminal.Restore()
	// The last reading may be older than the last takeover.
	d.follow.readOnce(watch)

	d.mu.Lock()
	takeovers := int(d.lastOwnership.epoch - d.firstEpoch)
	d.mu.Unlock()
	res := newResult(d.check.Report(), d.latency.Figures(), takeovers, d.isIdle())
	if d.options.Events > res.Events {
		res.Broken = errors.Join(res.Broken, fmt.Errorf("%d of %d events were appended", res.Events, d.options.Events))
	}
	d.broken = res.Err() != nil
	d.view.printLine(" %s", res.formatSummary())

	// Report the result now: with Keep, the servers stay up until the user ends them.
	if d.options.Result != nil && err == nil {
		d.options.Result(res)
	}
	if d.options.Keep && !d.isIdle() && err == nil && ctx.Err() == nil {
		d.printConnections()
		d.view.printLine(" all stays up until Ctrl-C")
		<-ctx.Done()
	}
	return res, err
}

// checkRecord passes a record to the checker.
func (d *demo) checkRecord(message devstack.Message) {
	d.check.Delivered(check.Delivery{
		ID:        message.Header(record.HeaderID),
		Key:       string(message.Key),
		Topic:     message.Topic,
		Partition: message.Partition,
		Offset:    message.Offset,
		Value:     message.Value,
		Flagged:   d.allowFlagged && message.Header(record.HeaderRedelivered) == "true",
		Seen:      message.Seen,
	})
}

// startRelays starts the owner and then its standby, and blocks until both are ready.
func (d *demo) startRelays(ctx context.Context) error {
	owner, err := d.relays.startRelay()
	if err != nil {
		return err
	}
	err = d.relays.awaitRelay(ctx, owner, "take over", func() bool {
		return d.relays.readPhase(ctx, owner) == "owner" && d.follow.currentOwner().node == owner.node
	})
	if err != nil {
		return err
	}

	standby, err := d.relays.startRelay()
	if err != nil {
		return err
	}
	err = d.relays.awaitRelay(ctx, standby, "stand by", func() bool {
		return d.relays.readPhase(ctx, standby) == "standby"
	})
	if err != nil {
		return err
	}

	d.view.printLine("  watcher %q     owner %s · epoch %d · standby %s",
		watcher, owner.node, d.follow.currentOwner().epoch, standby.node)
	d.view.printLine("  metrics           http://%s/metrics", owner.http)
	return nil
}

// printReady prints that everything runs and how to end it, and for a service of the user, how to connect.
func (d *demo) printReady() {
	if d.options.Events > 0 {
		return
	}
	if d.hasVisitors() {
		d.printConnections()
	}

	end := "Ctrl-C stops everything"
	if d.options.Terminal != nil {
		end = "q or Ctrl-C stops everything"
		if d.options.Keep && !d.isIdle() {
			end = "q stops the load, Ctrl-C everything"
		}
	}
	d.view.printLine("  all ready         %s", end)
}

// printConnections prints how to connect to the servers and the relays.
func (d *demo) printConnections() {
	d.view.printLine("  MongoDB           %s", d.stack.MongoURI())
	d.view.printLine("  Kafka             %s", strings.Join(d.stack.Brokers(), ","))
	for _, x := range d.relays.liveRelays() {
		d.view.printLine("  relay %-11s pid %d  http://%s/readyz", x.node, x.prog.PID(), x.http)
	}

	program := d.options.Binary
	if strings.Contains(program, "go-build") {
		// go run removes its program at the end.
		program = "go run ./cmd/outrelay"
	}
	d.view.printLine("  your own events   append them to %s.%s with these variables:", d.names.database, outboxName)
	d.view.printLine("    export MONGODB_URI='%s' KAFKA=%s", d.stack.MongoURI(), strings.Join(d.stack.Brokers(), ","))
	d.view.printLine("    %s dev topic %s --brokers %s   # prints the records", program, d.names.topicName(aggregate), d.stack.Brokers()[0])
	d.view.printLine("    %s status --config %s", program, d.relays.config)
}
