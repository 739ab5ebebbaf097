//go:build !release

package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"runtime"
	"runtime/pprof"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/outrelay/outrelay/internal/bench"
)

// consumerEvents is how many records bench --consumer writes: with a transaction for each, those of the relay's backlog
// would take long.
const consumerEvents = 20_000

// observedEvents is how many bench --observed drains: a drain has to last for a while, or what starting takes and what the machine does
// to it is more than what looking costs.
const observedEvents = 1_000_000

func newBenchCommand(p *program) *cobra.Command {
	o := bench.Options{}
	var seconds int
	var asJSON, reconciler, handlers, observed bool
	c := &cobra.Command{
		Use:   "bench",
		Short: "Measure the relay against the limits of the servers, in one run",
		Long: `Measure, in one run and on the same servers: the raw change stream with the driver alone, the raw produce rate, both at
once, the drain of a backlog through the relay in a process of its own (rate, CPU, memory, allocations), and the latency from an
acknowledged insert to a consumer beside that of a bare change stream. Runs are interleaved; medians are reported.

With --reconciler it measures instead what goes beside the stream, and the drain of the stream in the same run: the drain of
what is scheduled, the error of due times, the sweep of a gap, what is parked and delivered later, and the purge.

With --consumer it measures what stands on the other side of Kafka: a handler of pkg/consumer with its inbox beside a loop around
kafka-go's Reader with one transaction for each record, both with the same effect; 20,000 records unless --events says otherwise.

With --observed it measures what looking costs: the same backlog is drained in pairs, once with nobody who asks and once with the
operator's page and its live stream open and /metrics scraped every second; 1,000,000 events unless --events says otherwise.

Without --mongodb and --kafka it starts servers of its own on this machine. Keep the machine quiet meanwhile: the part of the
CPU time that others used is reported as foreign. The defaults take about six minutes.`,
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			o.Duration = time.Duration(seconds) * time.Second
			o.Progress, o.OnHardStop = p.errOut, p.onHardStop
			if handlers && !c.Flags().Changed("events") {
				o.Events = consumerEvents
			}
			if observed && !c.Flags().Changed("events") {
				o.Events = observedEvents
			}
			if err := o.Check(); err != nil {
				return err
			}
			return p.measure(c.Context(), o, asJSON, kind(handlers, reconciler, observed))
		},
	}
	f := c.Flags()
	f.IntVar(&o.Events, "events", 300_000, "`number` of events to drain")
	f.IntVar(&o.Payload, "payload", 1024, "`bytes` of an event's payload")
	f.IntVar(&o.Runs, "runs", 3, "`number` of interleaved runs")
	f.IntSliceVar(&o.Rates, "rates", []int{100, 1000}, "`events` per second at which latency is measured, separated by commas")
	f.IntVar(&seconds, "seconds", 15, "`seconds` of each rate in each run")
	f.IntVar(&o.Failover, "failover", 0, "`times` that the owner is killed, and asked to end, beside a standby")
	f.DurationVar(&o.TTL, "ttl", 0, "`lease` time of the failover; the configuration's default if 0")
	f.BoolVar(&reconciler, "reconciler", false, "measure what goes beside the stream instead")
	f.BoolVar(&handlers, "consumer", false, "measure a handler with its inbox instead")
	f.BoolVar(&observed, "observed", false, "measure drains in pairs instead, one of each with the page open and a scraper")
	f.IntVar(&o.Pairs, "pairs", bench.DefaultPairs, "with --observed, the `number` of pairs")
	f.StringSliceVar(&o.Only, "only", nil, "with --reconciler, the `measurements` that are wanted: "+strings.Join(bench.ReconcilerSteps(), ", "))
	f.StringVar(&o.MongoDB, "mongodb", "", "`URI` of a replica set to measure on, instead of one of its own")
	f.StringSliceVar(&o.Kafka, "kafka", nil, "`addresses` of brokers to measure on, without login, instead of one of its own")
	f.StringVar(&o.CPUProfile, "cpuprofile", "", "beginning of the `file` names for CPU profiles of the relay")
	f.StringVar(&o.MemProfile, "memprofile", "", "beginning of the `file` names for allocation profiles of the relay")
	f.BoolVar(&asJSON, "json", false, "print one JSON object on standard output")
	c.MarkFlagsMutuallyExclusive("reconciler", "consumer", "observed")
	return c
}

// measured is what any of the benchmarks found.
type measured interface{ Print(w io.Writer) error }

// kind is the benchmark that was asked for.
func kind(handlers, reconciler, observed bool) func(context.Context, bench.Options) (measured, error) {
	switch {
	case handlers:
		return func(ctx context.Context, o bench.Options) (measured, error) { return bench.RunConsumer(ctx, o) }
	case reconciler:
		return func(ctx context.Context, o bench.Options) (measured, error) { return bench.RunReconciler(ctx, o) }
	case observed:
		return func(ctx context.Context, o bench.Options) (measured, error) { return bench.RunObserved(ctx, o) }
	}
	return func(ctx context.Context, o bench.Options) (measured, error) { return bench.Run(ctx, o) }
}

// measure runs one and prints what it found.
func (p *program) measure(ctx context.Context, o bench.Options, asJSON bool, run func(context.Context, bench.Options) (measured, error)) error {
	res, err := run(ctx, o)
	if err != nil {
		return temporary(err)
	}
	if asJSON {
		return printJSON(p.out, res)
	}
	return res.Print(p.errOut)
}

// newBenchChildCommand is what bench starts for the raw measurements.
func newBenchChildCommand(p *program) *cobra.Command {
	return &cobra.Command{
		Use: bench.ChildCommand, Hidden: true, Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error { return temporary(bench.Child(c.Context(), p.in, p.out)) },
	}
}

// newBenchRelayCommand is run, except that it ends with its standard input, and that it can be profiled.
func newBenchRelayCommand(p *program) *cobra.Command {
	var cpu, mem string
	c := &cobra.Command{
		Use: bench.RelayCommand, Hidden: true, Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			ctx, cancel := context.WithCancel(c.Context())
			defer cancel()
			go func() {
				_, _ = io.Copy(io.Discard, p.in)
				cancel()
			}()
			stop, err := profile(cpu, mem)
			if err != nil {
				return err
			}
			defer stop()
			return p.relay(ctx)
		},
	}
	c.Flags().StringVar(&cpu, "cpuprofile", "", "")
	c.Flags().StringVar(&mem, "memprofile", "", "")
	return c
}

// profile begins what is asked for; stop writes it.
func profile(cpu, mem string) (stop func(), err error) {
	var stops []func()
	if cpu != "" {
		f, err := os.Create(cpu)
		if err != nil {
			return nil, err
		}
		if err := pprof.StartCPUProfile(f); err != nil {
			return nil, fmt.Errorf("profiling: %w", err)
		}
		stops = append(stops, func() { pprof.StopCPUProfile(); _ = f.Close() })
	}
	if mem != "" {
		runtime.MemProfileRate = 4096
		f, err := os.Create(mem)
		if err != nil {
			return nil, err
		}
		stops = append(stops, func() { _ = pprof.Lookup("allocs").WriteTo(f, 0); _ = f.Close() })
	}
	return func() {
		for _, s := range stops {
			s()
		}
	}, nil
}
