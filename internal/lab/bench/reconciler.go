package bench

import (
	"context"
	"fmt"
	"io"
	"slices"
	"text/tabwriter"
	"time"

	"github.com/outrelay/outrelay/internal/contract/config"
)

const (
	// dueAtOnce is the number of envelopes for the due error, unless there are fewer events.
	dueAtOnce = 10_000
	// parkedPart is the divisor for the number of parked events. Each of them is written twice, so all would
	// take too long.
	parkedPart = 5
)

// ReconcilerResult has the medians of the runs of a benchmark of the reconciler.
type ReconcilerResult struct {
	DrainEPS       float64 `json:"drain_eps"`       // of the stream's backlog, events per second
	ScheduledEPS   float64 `json:"scheduled_eps"`   // of as many due scheduled envelopes, which the stream delivers too
	ScheduledRatio float64 `json:"scheduled_ratio"` // scheduled ÷ stream, of the same run
	KnownEPS       float64 `json:"known_eps"`       // of as many that the stream has passed
	KnownRatio     float64 `json:"known_ratio"`

	DueEvents int     `json:"due_events"`       // due at the same moment
	DueP50    float64 `json:"due_error_p50_ms"` // from that moment to a consumer
	DueP99    float64 `json:"due_error_p99_ms"`
	DueMax    float64 `json:"due_error_max_ms"`
	RawDueP50 float64 `json:"raw_due_p50_ms"` // of as many records of a bare producer, from the moment of the first
	RawDueP99 float64 `json:"raw_due_p99_ms"`

	BurstEvents int     `json:"due_burst_events"`  // due at the same moment
	BurstS      float64 `json:"due_burst_s"`       // until the last of them is at a consumer
	BurstLimitS float64 `json:"due_burst_limit_s"` // limit: one second plus the time of the scheduled drain

	SweepEPS     float64 `json:"sweep_eps"`
	SweepPeakRSS float64 `json:"sweep_peak_rss_mb"` // MiB, of the whole process
	SweepBudget  float64 `json:"sweep_budget_mb"`   // maximum use of the budget
	BudgetMB     float64 `json:"budget_mb"`
	DrainPeakRSS float64 `json:"peak_rss_mb"` // of the drain of the stream, for comparison

	ParkedEvents int     `json:"parked_events"`
	ParkingEPS   float64 `json:"parking_eps"` // stored as parked
	ParkedEPS    float64 `json:"parked_eps"`  // delivered after the creation of their topic

	PurgeEPS float64 `json:"purge_eps"`

	OtherCPU

	Events  int `json:"events"`
	Payload int `json:"payload_bytes"`
	Runs    int `json:"runs"`
}

// figures has the figures of all runs, by name.
type figures map[string][]float64

func (f figures) addValue(name string, value float64) { f[name] = append(f[name], value) }

// medianRatio returns the median of the ratios within each run, because the servers drift.
func (f figures) medianRatio(numerator, denominator string) float64 {
	return medianRatio(f[numerator], f[denominator])
}

// RunReconciler measures the deliveries outside of the stream, and the drain of the stream for comparison. It takes
// minutes. The end of ctx interrupts it.
func RunReconciler(ctx context.Context, options Options) (res ReconcilerResult, err error) {
	err = options.withServers(ctx, func(bench *bench) error {
		if err := bench.fillBacklogs(ctx); err != nil {
			return err
		}

		bench.logProgress("warming the servers up")
		if _, err := bench.drainBacklog(ctx, 0); err != nil {
			return fmt.Errorf("drain: %w", err)
		}

		got, otherCPU := figures{}, figures{}
		for number := 1; number <= bench.Runs; number++ {
			run := reconcilerRun{bench: bench, number: number, got: got, otherCPU: otherCPU}
			if err := run.measureSteps(ctx); err != nil {
				return err
			}
		}

		res = newReconcilerResult(bench.Options, got, otherCPU)
		return nil
	})
	return res, err
}

// reconcilerRun is one run of the measurements of the reconciler. Each run has its own topics and state databases, and adds its
// figures to those of the earlier runs.
type reconcilerRun struct {
	*bench
	number        int
	got, otherCPU figures
}

// step is one measurement of a run.
type step struct {
	name    string
	measure func(*reconcilerRun, context.Context) (meterReading, error)
}

// steps are the measurements of a run. The two drains of the ratio are next to each other.
var steps = []step{
	{"drain", (*reconcilerRun).drainStream},
	{"scheduled", (*reconcilerRun).drainScheduled},
	{"known", (*reconcilerRun).drainKnown},
	{"sweep", (*reconcilerRun).sweepGap},
	{"due", (*reconcilerRun).measureDueError},
	{"raw_due", (*reconcilerRun).measureRawMoment},
	{"burst", (*reconcilerRun).measureBurst},
	{"parked", (*reconcilerRun).drainParked},
	{"purge", (*reconcilerRun).purgeDelivered},
}

// ReconcilerSteps returns the names of the measurements of [RunReconciler], for Options.Only.
func ReconcilerSteps() []string {
	names := make([]string, len(steps))
	for i, s := range steps {
		names[i] = s.name
	}
	return names
}

// measureSteps makes the measurements of the run, or those that Only names.
func (r *reconcilerRun) measureSteps(ctx context.Context) error {
	for _, s := range steps {
		if len(r.Only) > 0 && !slices.Contains(r.Only, s.name) {
			continue
		}

		reading, err := s.measure(r, ctx)
		if err != nil {
			return fmt.Errorf("%s: %w", s.name, err)
		}

		if reading.known {
			r.otherCPU.addValue(s.name, reading.otherCPU)
		}
		r.logProgress("run %d of %d: %-10s %s  CPU of others %.1f %%", r.number, r.Runs, s.name, reading.words, reading.otherCPU)
	}
	return nil
}

// meterReading has the text and the CPU of others of one measurement.
type meterReading struct {
	words    string
	otherCPU float64
	known    bool // whether otherCPU is known
}

func newReading(meter *meter, format string, args ...any) meterReading {
	reading := meterReading{words: fmt.Sprintf(format, args...)}
	reading.otherCPU, reading.known = meter.measureOtherCPU()
	return reading
}

func (r *reconcilerRun) drainStream(ctx context.Context) (meterReading, error) {
	drained, err := r.drainBacklog(ctx, r.number)
	r.got.addValue("drain", drained.eps)
	r.got.addValue("drain_rss", drained.peak)
	return meterReading{fmt.Sprintf("%8.0f/s  %.1f MB", drained.eps, drained.peak), drained.otherCPU, drained.known}, err
}

// newReconcilerResult returns the medians of the figures.
func newReconcilerResult(options Options, got, otherCPU figures) ReconcilerResult {
	whole := func(name string) float64 { return round(median(got[name]), 0) }
	fine := func(name string) float64 { return round(median(got[name]), 1) }

	result := ReconcilerResult{
		DrainEPS: whole("drain"), ScheduledEPS: whole("scheduled"), KnownEPS: whole("known"), SweepEPS: whole("sweep"),
		ParkingEPS: whole("parking"), ParkedEPS: whole("parked"), PurgeEPS: whole("purge"),
		DueEvents: dueEvents(options), DueP50: fine("due_p50"), DueP99: fine("due_p99"), DueMax: fine("due_max"),
		RawDueP50: fine("raw_due_p50"), RawDueP99: fine("raw_due_p99"),
		BurstEvents: options.Events, BurstS: round(median(got["burst"]), 2),
		SweepPeakRSS: fine("sweep_rss"), SweepBudget: fine("sweep_budget"), DrainPeakRSS: fine("drain_rss"),
		BudgetMB:     float64(config.Default().Limits.Memory) / (1 << 20),
		ParkedEvents: parkedEvents(options), OtherCPU: newOtherCPU(otherCPU),
		Events: options.Events, Payload: options.Payload, Runs: options.Runs,
	}

	result.ScheduledRatio, result.KnownRatio = got.medianRatio("scheduled", "drain"), got.medianRatio("known", "drain")
	if eps := median(got["scheduled"]); eps > 0 {
		result.BurstLimitS = round(1+float64(options.Events)/eps, 2)
	}
	return result
}

// Print writes the result as a table for people.
func (r ReconcilerResult) Print(out io.Writer) error {
	table := tabwriter.NewWriter(out, 0, 8, 2, ' ', 0)
	row := func(name, format string, args ...any) {
		fmt.Fprintf(table, "%s\t%s\n", name, fmt.Sprintf(format, args...))
	}

	fmt.Fprintf(table, "\n%d events of %d bytes, medians of %d runs\t\n", r.Events, r.Payload, r.Runs)
	row("drain of the stream", "%.0f events/s", r.DrainEPS)
	row("drain of scheduled events", "%.0f events/s, %.3f of the stream's of the same run",
		r.ScheduledEPS, r.ScheduledRatio)
	row("passed by the stream before", "%.0f events/s, %.3f of the stream's of the same run", r.KnownEPS, r.KnownRatio)
	row("due error", "p50 %.0f ms, p99 %.0f ms, at most %.0f ms, of %d due at once",
		r.DueP50, r.DueP99, r.DueMax, r.DueEvents)
	row("as many records of a bare producer", "p50 %.0f ms, p99 %.0f ms", r.RawDueP50, r.RawDueP99)
	row("burst", "%.2f s for %d due at once; it may be %.2f s", r.BurstS, r.BurstEvents, r.BurstLimitS)
	row("sweep of a gap", "%.0f events/s, %.1f MB at most, %.1f MB of a budget of %.0f in use",
		r.SweepEPS, r.SweepPeakRSS, r.SweepBudget, r.BudgetMB)
	row("memory while draining", "%.1f MB at most", r.DrainPeakRSS)
	row("parked", "%.0f events/s stored; %.0f events/s delivered afterwards, of %d",
		r.ParkingEPS, r.ParkedEPS, r.ParkedEvents)
	row("purge", "%.0f envelopes/s", r.PurgeEPS)

	row("CPU of others", "%s", r.describeOtherCPU())
	return table.Flush()
}

// startOwner starts a relay and blocks until it has taken over. observedAt is the time at which this was observed.
func (b *bench) startOwner(ctx context.Context, setting setting) (relay *relay, observedAt time.Time, err error) {
	relay, err = b.startRelay(setting)
	if err != nil {
		return nil, observedAt, err
	}

	began := time.Now()
	for relay.readPhase(ctx) != "owner" {
		if err := relay.checkRunning(); err != nil {
			return nil, observedAt, err
		}
		if time.Since(began) > stall {
			return nil, observedAt, fmt.Errorf("the relay has not taken over within %s (%w)", stall, relay.stopProcess())
		}

		select {
		case <-ctx.Done():
			_ = relay.stopProcess()
			return nil, observedAt, context.Cause(ctx)
		case <-time.After(fast):
		}
	}
	return relay, time.Now(), nil
}
