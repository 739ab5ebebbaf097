//go:build !release

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"
	"runtime/pprof"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/outrelay/outrelay/internal/lab/bench"
)

// consumerEvents is the default number of records for bench --consumer. Each record needs a
// transaction, so the default for the relay's backlog would take too long.
const consumerEvents = 20_000

// memberEvents is the default for bench --consumer --transport: the drain takes long enough for several rebalances.
const memberEvents = 200_000

// observedEvents is the default number of events for bench --observed. A short drain would measure
// mainly the start and the noise of the machine, because both exceed the cost of observation.
const observedEvents = 1_000_000

func newBenchCommand(program *program) *cobra.Command {
	options := bench.Options{}
	var seconds int
	var asJSON, reconciler, consumer, observed bool
	cmd := &cobra.Command{
		Use:   "bench",
		Short: "Measure the relay and compare it with the limits of the servers",
		Long: `Measure, in one run and on the same servers: the change stream with the driver alone, the produce
rate alone, both together, and the drain of a backlog through a relay process (rate, CPU, memory,
allocations). Also measure the latency from an acknowledged insert to a consumer, and compare it
with the latency of a bare change stream. Runs are interleaved, and medians are reported.

With --reconciler, measure instead the delivery outside of the stream, and the drain of the stream
in the same run: the drain of scheduled events, the delay after their due times, the sweep of a gap,
the later delivery of parked events, and the purge.

With --consumer, measure instead a handler of pkg/consumer with its inbox. It is compared with a
loop around kafka-go's Reader that has the same effect with one transaction per record. The default
is 20,000 records.

With --consumer --transport kafka-go,franz, compare instead the libraries that join consumer groups:
one member drains a topic, alone, and while a second member joins and leaves every four seconds. The
default is 200,000 records.

With --peers debezium,mongo-kafka, compare instead with these publishers on the same servers: the drain
of a backlog, the latency at each rate, the CPU time of publisher and MongoDB, the memory, and the
silence and the repeats after kill -9. Each runs with its defaults and with settings for low latency,
outrelay with documents of pkg/outbox and with documents of another writer. Maven fetches Kafka Connect
and the connectors (about 70 MB). The defaults are 100,000 events and two rounds, which take about
thirteen minutes. The command prints the table of the README.

With --observed, measure instead the cost of observation. The same backlog is drained in pairs: once
without observers, and once with the operator's page and its live stream open and /metrics scraped
every second. The default is 1,000,000 events.

With --growth 1,2,4,8,16, measure instead the cost of more change streams at 1,000 events per second in all: of one
outbox with that number of slots, and of as many outboxes with a watcher each.

Without --mongodb and --kafka, the command starts its own servers on this machine. Leave the machine
idle while it runs: the report shows the CPU time of other processes. The defaults take
about seven minutes. With --peers and --config, it measures on the servers of the configuration, with their
logins: a password or a certificate.`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			options.Duration = time.Duration(seconds) * time.Second
			options.Progress, options.OnHardStop = program.errOut, program.onHardStop
			// A record of a consumer costs a transaction, so its default is smaller.
			if consumer && !cmd.Flags().Changed("events") {
				options.Events = consumerEvents
				if len(options.Transports) > 0 {
					options.Events = memberEvents
				}
			}
			if len(options.Transports) > 0 && !consumer {
				return errors.New("--transport compares consumers: add --consumer")
			}
			if observed && !cmd.Flags().Changed("events") {
				options.Events = observedEvents
			}
			if len(options.Peers) > 0 {
				setPeerDefaults(cmd, &options)
				if program.configFile != "" {
					cfg, _, err := program.loadConfig()
					if err != nil {
						return err
					}
					options.Config = &cfg
				}
			}
			if err := options.Check(); err != nil {
				return err
			}

			return program.runBenchmark(cmd.Context(), options, asJSON, selectBenchmark(consumer, reconciler, observed, options))
		},
	}

	flags := cmd.Flags()
	flags.IntVar(&options.Events, "events", 300_000, "`number` of events to drain")
	flags.IntVar(&options.Payload, "payload", 1024, "size of the payload of an event in `bytes`")
	flags.IntVar(&options.Runs, "runs", 3, "`number` of interleaved runs")
	flags.IntSliceVar(&options.Rates, "rates", []int{100, 1000}, "`events` per second at which latency is measured, separated by commas")
	flags.IntVar(&seconds, "seconds", 15, "duration of each rate in each run in `seconds`")
	flags.IntVar(&options.Failover, "failover", 0, "how many `times` the owner is killed, and stopped gracefully, while a standby runs")
	flags.BoolVar(&options.Foreign, "foreign", false, "also drain documents as another writer inserts them, without ts and slot")
	flags.DurationVar(&options.TTL, "ttl", 0, "`lease` time for --failover; 0: the default of the configuration")
	flags.BoolVar(&reconciler, "reconciler", false, "measure the delivery outside of the stream instead")
	flags.BoolVar(&consumer, "consumer", false, "measure a handler with its inbox instead")
	flags.StringSliceVar(&options.Transports, "transport", nil, "with --consumer, compare these `libraries` while members join and leave: "+strings.Join(bench.Transports(), ", "))
	flags.StringSliceVar(&options.Peers, "peers", nil, "compare with these `publishers` instead: "+strings.Join(bench.Peers(), ", "))
	flags.BoolVar(&observed, "observed", false, "measure pairs of drains instead: one with the page open and a scraper, one without")
	flags.IntVar(&options.Pairs, "pairs", bench.DefaultPairs, "with --observed, the `number` of pairs")
	flags.IntSliceVar(&options.Growth, "growth", nil, "compare these `numbers` of slots, and of watchers, at the same rate instead")
	flags.StringSliceVar(&options.Only, "only", nil, "with --reconciler, only these `measurements`: "+strings.Join(bench.ReconcilerSteps(), ", "))
	flags.StringVar(&options.MongoDB, "mongodb", "", "`URI` of an existing replica set to measure on")
	flags.StringSliceVar(&options.Kafka, "kafka", nil, "`addresses` of existing brokers to measure on, without login")
	flags.StringVar(&options.Relay, "relay", "", "`program` whose relay is measured, such as a release; default: the program that runs bench")
	flags.StringVar(&options.CPUProfile, "cpuprofile", "", "prefix of the `file` names for CPU profiles of the relay")
	flags.StringVar(&options.MemProfile, "memprofile", "", "prefix of the `file` names for allocation profiles of the relay")
	flags.BoolVar(&asJSON, "json", false, "print one JSON object on standard output")
	cmd.MarkFlagsMutuallyExclusive("reconciler", "consumer", "observed", "foreign", "peers", "growth")
	return cmd
}

// setPeerDefaults sets the defaults of a comparison with other publishers for flags that the user
// did not set.
func setPeerDefaults(cmd *cobra.Command, options *bench.Options) {
	for name, set := range map[string]func(){
		"events":  func() { options.Events = bench.DefaultPeerEvents },
		"runs":    func() { options.Runs = bench.DefaultPeerRuns },
		"payload": func() { options.Payload = bench.DefaultPeerPayload },
		"seconds": func() { options.Duration = bench.DefaultPeerDuration },
	} {
		if !cmd.Flags().Changed(name) {
			set()
		}
	}
}

// benchmarkResult is the result of a benchmark.
type benchmarkResult interface{ Print(w io.Writer) error }

type benchmark func(context.Context, bench.Options) (benchmarkResult, error)

// selectBenchmark returns the benchmark that the flags select.
func selectBenchmark(consumer, reconciler, observed bool, options bench.Options) benchmark {
	switch {
	case len(options.Peers) > 0:
		return asBenchmark(bench.RunPeers)
	case len(options.Transports) > 0:
		return asBenchmark(bench.RunMembers)
	case consumer:
		return asBenchmark(bench.RunConsumer)
	case reconciler:
		return asBenchmark(bench.RunReconciler)
	case len(options.Growth) > 0:
		return asBenchmark(bench.RunGrowth)
	case observed:
		return asBenchmark(bench.RunObserved)
	}
	return asBenchmark(bench.Run)
}

// asBenchmark returns run with a result of the common type.
func asBenchmark[R benchmarkResult](run func(context.Context, bench.Options) (R, error)) benchmark {
	return func(ctx context.Context, options bench.Options) (benchmarkResult, error) { return run(ctx, options) }
}

// runBenchmark runs a benchmark and prints its result.
func (p *program) runBenchmark(ctx context.Context, options bench.Options, asJSON bool, run benchmark) error {
	res, err := run(ctx, options)
	if err != nil {
		return markTemporary(err)
	}

	if asJSON {
		if err := printJSON(p.out, res); err != nil {
			return err
		}
		// A comparison is recorded as JSON, and its table is for a page.
		if _, isComparison := res.(bench.PeersResult); isComparison {
			return res.Print(p.errOut)
		}
		return nil
	}
	return res.Print(p.out)
}

// newBenchChildCommand returns the hidden command that bench starts for the measurements without a relay.
func newBenchChildCommand(program *program) *cobra.Command {
	return &cobra.Command{
		Use: bench.ChildCommand, Hidden: true, Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return markTemporary(bench.Child(cmd.Context(), program.in, program.out))
		},
	}
}

// newBenchRelayCommand returns the hidden command that bench starts as the relay. Unlike run, it can write profiles.
func newBenchRelayCommand(program *program) *cobra.Command {
	var cpu, mem string
	cmd := &cobra.Command{
		Use: bench.RelayCommand, Hidden: true, Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) (err error) {
			stop, err := startProfiles(cpu, mem)
			if err != nil {
				return err
			}
			defer func() { err = errors.Join(err, stop()) }()
			return program.runRelay(cmd.Context())
		},
	}

	cmd.Flags().StringVar(&cpu, "cpuprofile", "", "")
	cmd.Flags().StringVar(&mem, "memprofile", "", "")
	return cmd
}

// startProfiles starts a CPU profile into the file cpu and an allocation profile into the file mem,
// each unless its name is empty. stop writes the profiles and closes the files.
func startProfiles(cpu, mem string) (stop func() error, err error) {
	var stops []func() error
	if cpu != "" {
		file, err := os.Create(cpu)
		if err != nil {
			return nil, err
		}
		if err := pprof.StartCPUProfile(file); err != nil {
			return nil, fmt.Errorf("starting the CPU profile: %w", err)
		}
		stops = append(stops, func() error {
			pprof.StopCPUProfile()
			return file.Close()
		})
	}

	if mem != "" {
		// At the default rate, a short run would miss most of its allocations.
		runtime.MemProfileRate = 4096
		file, err := os.Create(mem)
		if err != nil {
			return nil, err
		}
		stops = append(stops, func() error {
			return errors.Join(pprof.Lookup("allocs").WriteTo(file, 0), file.Close())
		})
	}

	return func() (err error) {
		for _, stop := range stops {
			err = errors.Join(err, stop())
		}
		return err
	}, nil
}
