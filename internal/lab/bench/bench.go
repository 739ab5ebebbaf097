package bench

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/google/uuid"
	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/contract/config"
	"github.com/outrelay/outrelay/internal/lab/devstack"
)

// The hidden commands of the program that start children.
const (
	ChildCommand = "bench-child" // calls Child
	RelayCommand = "bench-relay" // `run` with profiles
)

// Options configure a benchmark. A field without a default must be set.
type Options struct {
	Events   int           // of the backlog
	Payload  int           // bytes of an event's payload, at least 8
	Runs     int           // interleaved runs; the results are medians
	Rates    []int         // events per second at which latency is measured; none measures none
	Duration time.Duration // of each rate

	// Failover is how often an owner with a standby is killed, and how often it is stopped gracefully. 0 skips this.
	Failover int
	// Foreign adds a drain of documents as another writer inserts them, without ts and slot, to each run.
	Foreign bool
	// TTL is the ttl of the lease in the failover. Defaults to that of the configuration.
	TTL time.Duration

	// Pairs is how many pairs of drains [RunObserved] makes. Defaults to [DefaultPairs].
	Pairs int
	// Transports are the transports that [RunMembers] compares: see [Transports].
	Transports []string
	// Peers are the publishers that [RunPeers] compares with outrelay: see [Peers].
	Peers []string
	// Growth are the numbers of change streams that [RunGrowth] compares.
	Growth []int
	// Only lists the measurements of the reconciler to run. Empty runs all.
	Only []string

	// MongoDB and Kafka name the servers, without login. If one is empty, its server is started, and stopped at
	// the end.
	MongoDB string
	Kafka   []string

	// Config names the servers instead, with their logins. Only for [RunPeers]. nil: no logins.
	Config *config.Config

	CPUProfile, MemProfile string // prefixes of the files for profiles of the relay, one per measurement

	Program  string    // the executable of the children; defaults to this one
	Relay    string    // the executable of the relays, such as a release, which writes no profiles; defaults to Program
	Progress io.Writer // receives a line per step; required
	// OnHardStop receives a function that the caller must run if the process ends at once. Optional.
	OnHardStop func(func())
}

// Check returns an error that lists every problem of the options.
func (o Options) Check() error {
	var errs []error
	least := func(name string, value, least int) {
		if value < least {
			errs = append(errs, fmt.Errorf("%s: %d is below %d", name, value, least))
		}
	}

	least("events", o.Events, 1)
	least("payload", o.Payload, minPayload)
	least("runs", o.Runs, 1)
	least("failover", o.Failover, 0)
	least("pairs", o.Pairs, 0)

	for _, r := range o.Rates {
		least("rates", r, 1)
	}
	if o.Relay != "" && o.CPUProfile+o.MemProfile != "" {
		errs = append(errs, errors.New("relay: another program writes no profiles"))
	}
	for _, n := range o.Growth {
		least("growth", n, 1)
	}
	for _, name := range o.Transports {
		if known := Transports(); !slices.Contains(known, name) {
			errs = append(errs, fmt.Errorf("transport: %q is not one of %s", name, strings.Join(known, ", ")))
		}
	}
	for _, name := range o.Peers {
		if known := Peers(); !slices.Contains(known, name) {
			errs = append(errs, fmt.Errorf("peers: %q is not one of %s", name, strings.Join(known, ", ")))
		}
	}
	for _, name := range o.Only {
		if known := ReconcilerSteps(); !slices.Contains(known, name) {
			errs = append(errs, fmt.Errorf("only: %q is not one of %s", name, strings.Join(known, ", ")))
		}
	}

	if len(o.Rates)+len(o.Peers)+len(o.Growth)+o.Failover > 0 && o.Duration < time.Second {
		errs = append(errs, fmt.Errorf("seconds: %v is below one second", o.Duration))
	}
	if o.TTL != 0 && o.TTL < time.Second {
		errs = append(errs, fmt.Errorf("ttl: %v is below one second", o.TTL))
	}
	return errors.Join(errs...)
}

// The collections of the benchmark's database.
const (
	backlog        = "outbox"
	foreignBacklog = "foreign" // the same events, as another writer inserts them
	live           = "live"
)

// bench is the state of one benchmark.
type bench struct {
	Options
	stack   *devstack.Stack // of the relays, and of the servers that were not given
	relays  int             // started so far
	servers []int           // known processes of the servers
	mongods []int           // databases of MongoDB
	login   *config.Config  // nil: without logins
	client  *mongo.Client
	cluster *cluster
	db      string
	start   bson.Timestamp

	numbered int
	numberOf numbering     // of the records that consumers read
	perDoc   time.Duration // slowest bulk write so far, per document
	states   []string
	began    time.Time
}

// Run runs the benchmark. It takes minutes. The end of ctx interrupts it.
func Run(ctx context.Context, options Options) (res Result, err error) {
	err = options.withServers(ctx, func(bench *bench) (err error) {
		res, err = bench.measureAll(ctx)
		return err
	})
	return res, err
}

// withServers opens the servers, calls measure, and then removes everything.
func (o Options) withServers(ctx context.Context, measure func(*bench) error) (err error) {
	if err := o.Check(); err != nil {
		return err
	}

	if o.Program == "" {
		o.Program, err = os.Executable()
		if err != nil {
			return fmt.Errorf("finding this program: %w", err)
		}
	}
	if err := o.makePathsAbsolute(); err != nil {
		return err
	}

	run := &bench{Options: o, db: "bench_" + uuid.NewString()[:8], began: time.Now(), numbered: 1, numberOf: eventNumber}
	defer func() { err = errors.Join(err, run.cleanUp(context.WithoutCancel(ctx))) }()
	if err := run.openServers(ctx); err != nil {
		return err
	}
	return measure(run)
}

// makePathsAbsolute makes the paths valid for relays, which run in a directory of their stack.
func (o *Options) makePathsAbsolute() error {
	var errs []error
	for _, path := range []*string{&o.Relay, &o.CPUProfile, &o.MemProfile} {
		// A program without a directory is on the PATH.
		if *path == "" || path == &o.Relay && filepath.Base(*path) == *path {
			continue
		}
		absolute, err := filepath.Abs(*path)
		*path, errs = absolute, append(errs, err)
	}
	return errors.Join(errs...)
}

func (b *bench) logProgress(format string, args ...any) {
	fmt.Fprintf(b.Progress, "%6.1f s  %s\n", time.Since(b.began).Seconds(), fmt.Sprintf(format, args...))
}

// openServers starts the servers, or connects to the given ones.
func (b *bench) openServers(ctx context.Context) (err error) {
	if b.Config != nil {
		if err := b.useConfig(b.Config); err != nil {
			return err
		}
	}
	var given []string
	want := devstack.Options{Progress: func(progress devstack.Progress) { b.logProgress("%s", progress) }}

	if b.MongoDB == "" {
		want.Mongods = 1
		want.Mongo = b.mongoOptions()
	} else {
		hosts := options.Client().ApplyURI(b.MongoDB).Hosts
		b.mongods = listeners(hosts)
		given = append(given, hosts...)
	}

	if len(b.Kafka) == 0 {
		want.Brokers = 1
	} else {
		given = append(given, b.Kafka...)
	}

	start := devstack.StartEmpty
	if want.Mongods+want.Brokers > 0 {
		start = func(ctx context.Context) (*devstack.Stack, error) { return devstack.Start(ctx, want) }
	}
	if b.stack, err = start(ctx); err != nil {
		return err
	}
	if b.OnHardStop != nil {
		b.OnHardStop(b.stack.Stop)
	}

	b.mongods = slices.Concat(b.mongods, knownPIDs(b.stack.Mongods()))
	b.servers = slices.Concat(knownPIDs(b.stack.Mongods()), knownPIDs(b.stack.Kafkas()))
	if b.MongoDB == "" {
		b.MongoDB = b.stack.MongoURI()
	}
	if len(b.Kafka) == 0 {
		b.Kafka = b.stack.Brokers()
	}

	for _, k := range b.Kafka {
		if _, _, err := net.SplitHostPort(k); err != nil {
			return fmt.Errorf("kafka: %q is not host:port", k)
		}
	}

	// Servers that are given by address may run on this machine, and their CPU time is not that of others either.
	b.servers = append(b.servers, listeners(given)...)
	b.cluster = newCluster(b.Kafka)
	if err := b.secureKafka(b.cluster.transport); err != nil {
		return err
	}
	b.client, err = b.connectMongo(ctx)
	return err
}

// mongoOptions returns the options of the mongod that the benchmark starts.
func (o Options) mongoOptions() devstack.MongoOptions {
	// The whole backlog fits into the memory and the oplog, so that the disk does not limit the figures.
	mb := o.Events / 1024 * (o.Payload + 600) / 1024
	return devstack.MongoOptions{
		CacheMB: max(1024, 3*mb), OplogMB: max(2048, 3*mb),
		// All runs write more than the oplog holds, and the last drain reads the same backlog as the first. So nothing of it is removed
		// for a day.
		Args: []string{"--oplogMinRetentionHours", "24"},
	}
}

// cleanUp removes everything that the benchmark has created.
func (b *bench) cleanUp(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	var errs []error

	if b.client != nil {
		if b.stack == nil || len(b.stack.Mongods()) == 0 {
			for _, db := range append(b.states, b.db) {
				errs = append(errs, b.client.Database(db).Drop(ctx))
			}
		}
		errs = append(errs, b.client.Disconnect(ctx))
	}

	if b.cluster != nil {
		b.cluster.closeIdle()
	}
	if b.stack != nil {
		b.stack.Stop()
	}
	return errors.Join(errs...)
}

// knownPIDs returns the process ids that are known.
func knownPIDs[P interface{ PID() int }](processes []P) (pids []int) {
	for _, p := range processes {
		if pid := p.PID(); pid != 0 {
			pids = append(pids, pid)
		}
	}
	return pids
}

// serverPIDs returns the processes that are not others.
func (b *bench) serverPIDs() []int { return slices.Clone(b.servers) }

// newTopic creates a new topic for a measurement.
func (b *bench) newTopic(ctx context.Context, name string) (string, error) {
	topic := b.db + "." + name
	return topic, b.cluster.createTopic(ctx, topic)
}

// newStateDB returns the name of a new state database, so that the watcher starts without a checkpoint.
func (b *bench) newStateDB(name string) string {
	db := b.db + "_" + strings.ReplaceAll(name, ".", "_")
	if !slices.Contains(b.states, db) {
		b.states = append(b.states, db)
	}
	return db
}

// samples are the figures of all runs.
type samples struct {
	raw, produce, both, drain                      []float64
	cpu, peak, allocs, mongodCPU                   []float64
	rawCPU, rawMongodCPU                           []float64
	foreignDrain                                   []drained
	early, end                                     []float64
	otherCPU                                       map[string][]float64
	rawP50, rawP99, bothP50, bothP99, p50, p99, p3 map[int][]float64
}

// measureAll runs all measurements of [Run].
func (b *bench) measureAll(ctx context.Context) (Result, error) {
	measured := &samples{
		otherCPU: map[string][]float64{},
		rawP50:   map[int][]float64{}, rawP99: map[int][]float64{}, bothP50: map[int][]float64{}, bothP99: map[int][]float64{},
		p50: map[int][]float64{}, p99: map[int][]float64{}, p3: map[int][]float64{},
	}

	if err := b.fillBacklogs(ctx); err != nil {
		return Result{}, err
	}

	coll, err := b.newOutbox(ctx, live)
	if err != nil {
		return Result{}, err
	}

	b.logProgress("warming the servers up")
	if err := b.measureCeilings(ctx, 0, &samples{otherCPU: map[string][]float64{}}); err != nil {
		return Result{}, err
	}

	for run := 1; run <= b.Runs; run++ {
		if err := b.measureCeilings(ctx, run, measured); err != nil {
			return Result{}, err
		}
		if err := b.measureDrain(ctx, run, measured); err != nil {
			return Result{}, err
		}
		if err := b.measureLatency(ctx, run, coll, measured); err != nil {
			return Result{}, err
		}
	}

	res := measured.medians(b)
	if b.Failover > 0 {
		if res.Failover, err = b.measureFailover(ctx); err != nil {
			return res, err
		}
	}
	return res, nil
}

// measureCeilings measures the limits of the servers, without a relay.
func (b *bench) measureCeilings(ctx context.Context, run int, samples *samples) error {
	topic, err := b.newTopic(ctx, fmt.Sprintf("raw%d", run))
	if err != nil {
		return err
	}
	defer b.cluster.deleteTopic(context.WithoutCancel(ctx), topic)

	stream := spec{
		Mode: modeStream, MongoDB: b.MongoDB, DB: b.db, Collection: backlog,
		Start: b.start, Events: b.Events, Payload: b.Payload,
	}
	produce := spec{Mode: modeProduce, Kafka: b.Kafka, Topic: topic, Events: b.Events, Payload: b.Payload}

	for _, step := range []struct {
		name  string
		to    *[]float64
		specs []spec
	}{
		{"raw_stream", &samples.raw, []spec{stream}},
		{"raw_produce", &samples.produce, []spec{produce}},
		{"both", &samples.both, []spec{stream, produce}},
	} {
		measured, err := b.runTogether(ctx, step.specs...)
		if err != nil {
			return err
		}

		// The slowest of the processes decides when the work is done.
		began, ended := measured.outcomes[0].Began, measured.outcomes[0].Ended
		for _, o := range measured.outcomes {
			began, ended = min(began, o.Began), max(ended, o.Ended)
		}
		rate := perSecond(b.Events, began, ended)
		*step.to = append(*step.to, rate)
		if step.to == &samples.raw {
			samples.rawCPU = append(samples.rawCPU, measured.cpu[0]*1e6/float64(b.Events))
			samples.rawMongodCPU = append(samples.rawMongodCPU, measured.mongod*1e6/float64(b.Events))
		}

		if measured.known {
			samples.otherCPU[step.name] = append(samples.otherCPU[step.name], measured.otherCPU)
		}
		if run > 0 {
			b.logProgress("run %d of %d: %-11s %8.0f/s  CPU of others %.1f %%", run, b.Runs, step.name, rate, measured.otherCPU)
		}
	}
	return nil
}

// measureDrain measures the drain of the backlog through the relay, and that of a foreign one if there is one. Even runs
// begin with the foreign one, so that neither profits from its place.
func (b *bench) measureDrain(ctx context.Context, run int, samples *samples) error {
	if b.Foreign && run%2 == 0 {
		if err := b.measureForeignDrain(ctx, run, samples); err != nil {
			return err
		}
	}

	drained, err := b.drainBacklog(ctx, run)
	if err != nil {
		return fmt.Errorf("drain: %w", err)
	}

	samples.drain = append(samples.drain, drained.eps)
	samples.cpu = append(samples.cpu, drained.cpuPerMillion)
	samples.mongodCPU = append(samples.mongodCPU, drained.mongodPerMillion)
	samples.peak = append(samples.peak, drained.peak)
	samples.allocs = append(samples.allocs, drained.allocs)
	samples.early = append(samples.early, drained.early)
	samples.end = append(samples.end, drained.end)

	if drained.known {
		samples.otherCPU["drain"] = append(samples.otherCPU["drain"], drained.otherCPU)
	}
	b.logProgress("run %d of %d: %-11s %8.0f/s  CPU of others %.1f %%  %.2f CPU-s per million  "+
		"%.1f MB (%.1f after 50,000)  %.3f allocations per event",
		run, b.Runs, "drain", drained.eps, drained.otherCPU, drained.cpuPerMillion, drained.peak, drained.early, drained.allocs)

	if b.Foreign && run%2 == 1 {
		return b.measureForeignDrain(ctx, run, samples)
	}
	return nil
}

// measureForeignDrain measures the drain of the documents of another writer.
func (b *bench) measureForeignDrain(ctx context.Context, run int, samples *samples) error {
	drained, err := b.drainForeign(ctx, run)
	if err != nil {
		return fmt.Errorf("drain of foreign documents: %w", err)
	}

	samples.foreignDrain = append(samples.foreignDrain, drained)
	if drained.known {
		samples.otherCPU["foreign_drain"] = append(samples.otherCPU["foreign_drain"], drained.otherCPU)
	}
	b.logProgress("run %d of %d: %-11s %8.0f/s  CPU of others %.1f %%  %.2f CPU-s per million  %.1f MB  %.2f CPU-s per million in MongoDB",
		run, b.Runs, "foreign", drained.eps, drained.otherCPU, drained.cpuPerMillion, drained.peak, drained.mongodPerMillion)
	return nil
}
