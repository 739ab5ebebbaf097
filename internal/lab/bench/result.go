package bench

import (
	"fmt"
	"io"
	"math"
	"slices"
	"text/tabwriter"
)

// Result has the medians of the runs of a benchmark.
type Result struct {
	RawStreamEPS  float64 `json:"raw_stream_eps"`  // events per second of a bare change stream
	RawProduceEPS float64 `json:"raw_produce_eps"` // records per second that Kafka accepts
	BothEPS       float64 `json:"both_eps"`        // both concurrently, until the slower has ended
	DrainEPS      float64 `json:"drain_eps"`       // through the relay
	DrainRatio    float64 `json:"drain_ratio"`     // drain ÷ raw stream

	OtherCPU
	CPUPerMillion  float64   `json:"cpu_s_per_million"`
	RawCPU         float64   `json:"raw_cpu_s_per_million"` // of the reader of the bare change stream
	CPURatio       float64   `json:"cpu_ratio"`             // relay ÷ reader of the bare stream; 0 if it is unknown
	PeakRSS        float64   `json:"peak_rss_mb"`           // MiB
	RSSAfter50k    float64   `json:"rss_50k_mb"`            // resident after the first 50,000 events; 0 in shorter drains
	RSSEnd         float64   `json:"rss_end_mb"`            // maximum after that
	AllocsPerEvent float64   `json:"allocs_per_event"`
	MongodCPU      float64   `json:"mongod_cpu_s_per_million"` // of the drain; -1 if it is unknown
	MongodRatio    float64   `json:"mongod_cpu_ratio"`         // MongoDB in the drain ÷ in the bare stream; 0 if it is unknown
	*Foreign                 // nil unless it was measured
	Latency        []Latency `json:"latency"`
	Failover       *Failover `json:"failover,omitempty"`

	Events  int `json:"events"`
	Payload int `json:"payload_bytes"`
	Runs    int `json:"runs"`
}

// OtherCPU is the share of the machine's CPU time that neither servers nor benchmark used, in percent.
type OtherCPU struct {
	// OtherCPUPct is the maximum of the medians of the measurements, or -1 if it is unknown.
	OtherCPUPct   float64            `json:"other_cpu_pct"`
	ByMeasurement map[string]float64 `json:"other_cpu"`
}

func newOtherCPU(samples map[string][]float64) OtherCPU {
	cpu := OtherCPU{OtherCPUPct: -1, ByMeasurement: map[string]float64{}}
	for name, v := range samples {
		cpu.ByMeasurement[name] = round(median(v), 1)
		cpu.OtherCPUPct = max(cpu.OtherCPUPct, cpu.ByMeasurement[name])
	}
	return cpu
}

// describeOtherCPU returns the share in words.
func (f OtherCPU) describeOtherCPU() string {
	if f.OtherCPUPct < 0 {
		return "unknown on this machine"
	}
	return fmt.Sprintf("%.1f %% of the machine, in the worst measurement", f.OtherCPUPct)
}

// Foreign has the figures of the drain of documents as another writer inserts them, without ts and slot.
type Foreign struct {
	EPS           float64 `json:"foreign_eps"`
	Ratio         float64 `json:"foreign_ratio"` // foreign ÷ drain of the same run
	CPUPerMillion float64 `json:"foreign_cpu_s_per_million"`
	MongodCPU     float64 `json:"foreign_mongod_cpu_s_per_million"` // -1 if it is unknown
	PeakRSS       float64 `json:"foreign_peak_rss_mb"`              // MiB
}

// foreignMedians returns the medians of the drains of another writer's documents, or nil if there are none.
func (s *samples) foreignMedians() *Foreign {
	if len(s.foreignDrain) == 0 {
		return nil
	}

	var eps, ratios, cpu, mongod, peak []float64
	for i, d := range s.foreignDrain {
		eps, ratios = append(eps, d.eps), append(ratios, d.eps/s.drain[i])
		cpu, mongod, peak = append(cpu, d.cpuPerMillion), append(mongod, d.mongodPerMillion), append(peak, d.peak)
	}
	return &Foreign{
		EPS: round(median(eps), 0), Ratio: round(median(ratios), 3), CPUPerMillion: round(median(cpu), 2),
		MongodCPU: round(median(mongod), 2), PeakRSS: round(median(peak), 1),
	}
}

// Latency is the time from the acknowledged insert to the arrival at a consumer, in milliseconds.
type Latency struct {
	Rate   int     `json:"rate"`
	RawP50 float64 `json:"raw_p50_ms"` // at a bare change stream
	RawP99 float64 `json:"raw_p99_ms"`
	// Both is at the consumer, if the reader of a bare change stream sends each event at once with kafka-go's client.
	BothP50 float64 `json:"both_p50_ms"`
	BothP99 float64 `json:"both_p99_ms"`
	P50     float64 `json:"p50_ms"` // at a Kafka consumer of the relay's topic
	P99     float64 `json:"p99_ms"`
	P999    float64 `json:"p999_ms"`
}

// Failover shows the effect of owners that end.
type Failover struct {
	TTLMS         float64 `json:"ttl_ms"`
	Kill          Gaps    `json:"kill"` // kill -9 of the owner → first delivery by the standby
	Term          Gaps    `json:"term"` // SIGTERM to the owner → first delivery by the standby
	IdleRestartMS float64 `json:"idle_restart_ms"`
	IdleRSS       float64 `json:"idle_rss_mb"`  // MiB of the owner at the end of --seconds without events; -1 if it is unknown
	IdleCPUPct    float64 `json:"idle_cpu_pct"` // of one core, in that time
	Events        int     `json:"events"`
	Lost          int     `json:"lost"`
	Duplicates    int     `json:"duplicates"`
	OutOfOrder    int     `json:"out_of_order"`
}

// Gaps are times without delivery, in milliseconds.
type Gaps struct {
	N   int     `json:"n"`
	P50 float64 `json:"p50_ms"`
	Max float64 `json:"max_ms"`
}

// median returns the median of values, or 0 if values is empty.
func median(values []float64) float64 {
	if len(values) == 0 {
		return 0
	}
	sorted := slices.Sorted(slices.Values(values))
	if n := len(sorted); n%2 == 0 {
		return (sorted[n/2-1] + sorted[n/2]) / 2
	}
	return sorted[len(sorted)/2]
}

// round rounds value to the given number of decimals.
func round(value float64, decimals int) float64 {
	power := math.Pow10(decimals)
	return math.Round(value*power) / power
}

// medianRatio returns the median of the quotients of the same run, without runs in which one of the two is unknown.
func medianRatio(values, bases []float64) float64 {
	var ratios []float64
	for i := range min(len(values), len(bases)) {
		if values[i] >= 0 && bases[i] > 0 {
			ratios = append(ratios, values[i]/bases[i])
		}
	}
	return round(median(ratios), 3)
}

// medians returns the medians of all figures.
func (s *samples) medians(bench *bench) Result {
	result := Result{
		RawStreamEPS: round(median(s.raw), 0), RawProduceEPS: round(median(s.produce), 0),
		BothEPS: round(median(s.both), 0), DrainEPS: round(median(s.drain), 0),
		CPUPerMillion: round(median(s.cpu), 2), PeakRSS: round(median(s.peak), 1), AllocsPerEvent: round(median(s.allocs), 3),
		RSSAfter50k: round(median(s.early), 1), RSSEnd: round(median(s.end), 1),
		MongodCPU: round(median(s.mongodCPU), 2), Foreign: s.foreignMedians(),
		OtherCPU: newOtherCPU(s.otherCPU), Latency: []Latency{},
		Events: bench.Events, Payload: bench.Payload, Runs: bench.Runs,
	}

	// Each drain is compared with the raw stream of its own run, because the server drifts.
	result.DrainRatio = medianRatio(s.drain, s.raw)
	result.RawCPU, result.CPURatio = round(median(s.rawCPU), 2), medianRatio(s.cpu, s.rawCPU)
	result.MongodRatio = medianRatio(s.mongodCPU, s.rawMongodCPU)

	for _, rate := range bench.Rates {
		result.Latency = append(result.Latency, Latency{
			Rate: rate, RawP50: round(median(s.rawP50[rate]), 3), RawP99: round(median(s.rawP99[rate]), 3),
			BothP50: round(median(s.bothP50[rate]), 3), BothP99: round(median(s.bothP99[rate]), 3),
			P50: round(median(s.p50[rate]), 3), P99: round(median(s.p99[rate]), 3), P999: round(median(s.p3[rate]), 3),
		})
	}
	return result
}

// Print writes the result as a table for people.
func (r Result) Print(out io.Writer) error {
	table := tabwriter.NewWriter(out, 0, 8, 2, ' ', 0)
	row := func(name, format string, args ...any) {
		fmt.Fprintf(table, "%s\t%s\n", name, fmt.Sprintf(format, args...))
	}

	fmt.Fprintf(table, "\n%d events of %d bytes, medians of %d runs\t\n", r.Events, r.Payload, r.Runs)
	row("raw change stream", "%.0f events/s", r.RawStreamEPS)
	row("raw produce", "%.0f records/s", r.RawProduceEPS)
	row("both at once", "%.0f events/s", r.BothEPS)
	row("drain through the relay", "%.0f events/s, %.3f of the raw stream of the same run", r.DrainEPS, r.DrainRatio)
	row("CPU of the relay", "%.2f s per million events, %.2f times that of the reader of the raw stream", r.CPUPerMillion, r.CPURatio)
	row("CPU of MongoDB", "%.2f s per million events, %.2f times as much as for the raw stream", r.MongodCPU, r.MongodRatio)
	row("memory of the relay", "%.1f MB at most; %.1f after 50,000 events, then %.1f at most",
		r.PeakRSS, r.RSSAfter50k, r.RSSEnd)
	row("allocations", "%.3f per event", r.AllocsPerEvent)

	if foreign := r.Foreign; foreign != nil {
		row("documents without ts", "%.0f events/s, %.3f of the drain of the same run; CPU per million %.2f s in the relay, "+
			"%.2f s in MongoDB; %.1f MB at most", foreign.EPS, foreign.Ratio, foreign.CPUPerMillion, foreign.MongodCPU, foreign.PeakRSS)
	}

	for _, l := range r.Latency {
		row(fmt.Sprintf("latency at %d/s", l.Rate), "p50 %.2f ms, p99 %.2f ms, p99.9 %.2f ms; bare stream %.2f / %.2f ms, with a bare producer %.2f / %.2f ms",
			l.P50, l.P99, l.P999, l.RawP50, l.RawP99, l.BothP50, l.BothP99)
	}

	if failover := r.Failover; failover != nil {
		row("kill -9 of the owner", "%d times, lease %.0f ms: next delivery after p50 %.0f ms, at most %.0f ms",
			failover.Kill.N, failover.TTLMS, failover.Kill.P50, failover.Kill.Max)
		row("SIGTERM to the owner", "%d times: next delivery after p50 %.0f ms, at most %.0f ms",
			failover.Term.N, failover.Term.P50, failover.Term.Max)
		row("restart while idle", "first delivery after %.0f ms", failover.IdleRestartMS)
		row("idle", "%.1f MiB, %.2f %% of a core", failover.IdleRSS, failover.IdleCPUPct)
		row("in all of them", "%d events: %d lost, %d duplicates, %d out of order",
			failover.Events, failover.Lost, failover.Duplicates, failover.OutOfOrder)
	}

	row("CPU of others", "%s", r.describeOtherCPU())
	return table.Flush()
}
