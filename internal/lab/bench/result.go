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

	ForeignCPU
	CPUPerMillion  float64   `json:"cpu_s_per_million"`
	PeakRSS        float64   `json:"peak_rss_mb"` // MiB
	RSSAfter50k    float64   `json:"rss_50k_mb"`  // resident after the first 50,000 events; 0 in shorter drains
	RSSEnd         float64   `json:"rss_end_mb"`  // maximum after that
	AllocsPerEvent float64   `json:"allocs_per_event"`
	MongodCPU      float64   `json:"mongod_cpu_s_per_million"` // of the drain; -1 if it is unknown
	*Foreign                 // nil unless it was measured
	Latency        []Latency `json:"latency"`
	Failover       *Failover `json:"failover,omitempty"`

	Events  int `json:"events"`
	Payload int `json:"payload_bytes"`
	Runs    int `json:"runs"`
}

// ForeignCPU is the share of the machine's CPU time that neither servers nor benchmark used, in percent.
type ForeignCPU struct {
	// ForeignCPUPct is the maximum of the medians of the measurements, or -1 if it is unknown.
	ForeignCPUPct float64            `json:"foreign_cpu_pct"`
	ByMeasurement map[string]float64 `json:"foreign_cpu"`
}

func newForeignCPU(samples map[string][]float64) ForeignCPU {
	f := ForeignCPU{ForeignCPUPct: -1, ByMeasurement: map[string]float64{}}
	for name, v := range samples {
		f.ByMeasurement[name] = round(median(v), 1)
		f.ForeignCPUPct = max(f.ForeignCPUPct, f.ByMeasurement[name])
	}
	return f
}

// describeForeign returns the share in words.
func (f ForeignCPU) describeForeign() string {
	if f.ForeignCPUPct < 0 {
		return "unknown on this machine"
	}
	return fmt.Sprintf("%.1f %% of the machine, in the worst measurement", f.ForeignCPUPct)
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
	P50    float64 `json:"p50_ms"` // at a Kafka consumer of the relay's topic
	P99    float64 `json:"p99_ms"`
	P999   float64 `json:"p999_ms"`
}

// Failover shows the effect of owners that end.
type Failover struct {
	TTLMS         float64 `json:"ttl_ms"`
	Kill          Gaps    `json:"kill"` // kill -9 of the owner → first delivery by the standby
	Term          Gaps    `json:"term"` // SIGTERM to the owner → first delivery by the standby
	IdleRestartMS float64 `json:"idle_restart_ms"`
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

// median returns the median of v, or 0 if v is empty.
func median(v []float64) float64 {
	if len(v) == 0 {
		return 0
	}
	s := slices.Sorted(slices.Values(v))
	if n := len(s); n%2 == 0 {
		return (s[n/2-1] + s[n/2]) / 2
	}
	return s[len(s)/2]
}

// round rounds v to the given number of decimals.
func round(v float64, decimals int) float64 {
	p := math.Pow10(decimals)
	return math.Round(v*p) / p
}

// medians returns the medians of all figures.
func (s *samples) medians(b *bench) Result {
	r := Result{
		RawStreamEPS: round(median(s.raw), 0), RawProduceEPS: round(median(s.produce), 0),
		BothEPS: round(median(s.both), 0), DrainEPS: round(median(s.drain), 0),
		CPUPerMillion: round(median(s.cpu), 2), PeakRSS: round(median(s.peak), 1), AllocsPerEvent: round(median(s.allocs), 3),
		RSSAfter50k: round(median(s.early), 1), RSSEnd: round(median(s.end), 1),
		MongodCPU: round(median(s.mongodCPU), 2), Foreign: s.foreignMedians(),
		ForeignCPU: newForeignCPU(s.foreign), Latency: []Latency{},
		Events: b.Events, Payload: b.Payload, Runs: b.Runs,
	}

	// Each drain is compared with the raw stream of its own run, because the server drifts.
	var ratios []float64
	for i := range s.drain {
		if s.raw[i] > 0 {
			ratios = append(ratios, s.drain[i]/s.raw[i])
		}
	}
	r.DrainRatio = round(median(ratios), 3)

	for _, rate := range b.Rates {
		r.Latency = append(r.Latency, Latency{
			Rate: rate, RawP50: round(median(s.rawP50[rate]), 3), RawP99: round(median(s.rawP99[rate]), 3),
			P50: round(median(s.p50[rate]), 3), P99: round(median(s.p99[rate]), 3), P999: round(median(s.p3[rate]), 3),
		})
	}
	return r
}

// Print writes the result as a table for people.
func (r Result) Print(w io.Writer) error {
	t := tabwriter.NewWriter(w, 0, 8, 2, ' ', 0)
	row := func(name, format string, args ...any) {
		fmt.Fprintf(t, "%s\t%s\n", name, fmt.Sprintf(format, args...))
	}

	fmt.Fprintf(t, "\n%d events of %d bytes, medians of %d runs\t\n", r.Events, r.Payload, r.Runs)
	row("raw change stream", "%.0f events/s", r.RawStreamEPS)
	row("raw produce", "%.0f records/s", r.RawProduceEPS)
	row("both at once", "%.0f events/s", r.BothEPS)
	row("drain through the relay", "%.0f events/s, %.3f of the raw stream of the same run", r.DrainEPS, r.DrainRatio)
	row("CPU of the relay", "%.2f s per million events", r.CPUPerMillion)
	row("CPU of MongoDB", "%.2f s per million events", r.MongodCPU)
	row("memory of the relay", "%.1f MB at most; %.1f after 50,000 events, then %.1f at most",
		r.PeakRSS, r.RSSAfter50k, r.RSSEnd)
	row("allocations", "%.3f per event", r.AllocsPerEvent)

	if f := r.Foreign; f != nil {
		row("documents without ts", "%.0f events/s, %.3f of the drain of the same run; CPU per million %.2f s in the relay, "+
			"%.2f s in MongoDB; %.1f MB at most", f.EPS, f.Ratio, f.CPUPerMillion, f.MongodCPU, f.PeakRSS)
	}

	for _, l := range r.Latency {
		row(fmt.Sprintf("latency at %d/s", l.Rate), "p50 %.2f ms, p99 %.2f ms, p99.9 %.2f ms; bare stream %.2f / %.2f ms",
			l.P50, l.P99, l.P999, l.RawP50, l.RawP99)
	}

	if f := r.Failover; f != nil {
		row("kill -9 of the owner", "%d times, lease %.0f ms: next delivery after p50 %.0f ms, at most %.0f ms",
			f.Kill.N, f.TTLMS, f.Kill.P50, f.Kill.Max)
		row("SIGTERM to the owner", "%d times: next delivery after p50 %.0f ms, at most %.0f ms",
			f.Term.N, f.Term.P50, f.Term.Max)
		row("restart while idle", "first delivery after %.0f ms", f.IdleRestartMS)
		row("in all of them", "%d events: %d lost, %d duplicates, %d out of order",
			f.Events, f.Lost, f.Duplicates, f.OutOfOrder)
	}

	row("foreign CPU", "%s", r.describeForeign())
	return t.Flush()
}
