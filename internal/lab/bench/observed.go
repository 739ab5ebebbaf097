package bench

import (
	"context"
	"fmt"
	"io"
	"slices"
	"text/tabwriter"
)

// DefaultPairs is how many pairs of drains show a difference of a few percent.
const DefaultPairs = 10

// ObservedResult shows the cost of observation: pairs of drains of the same backlog, one alone and one observed.
type ObservedResult struct {
	AloneEPS    float64   `json:"alone_eps"` // events per second without an observer; median
	ObservedEPS float64   `json:"observed_eps"`
	Ratio       float64   `json:"ratio"`  // observed ÷ alone; median of the pairs
	Ratios      []float64 `json:"ratios"` // of each pair, in order

	// CPUAlone and CPUObserved are CPU seconds of the relay per million events. They are comparable also on a machine
	// with other load.
	CPUAlone    float64 `json:"alone_cpu_s_per_million"`
	CPUObserved float64 `json:"observed_cpu_s_per_million"`
	RSSAlone    float64 `json:"alone_peak_rss_mb"`
	RSSObserved float64 `json:"observed_peak_rss_mb"`

	Scrapes   int `json:"scrapes"`       // of /metrics, in all observed drains
	Refreshes int `json:"refreshes"`     // of the page
	Messages  int `json:"live_messages"` // of the live stream

	OtherCPU

	Pairs   int `json:"pairs"`
	Events  int `json:"events"`
	Payload int `json:"payload_bytes"`
}

// RunObserved measures the cost of the operator's page, its live stream and a scraper for the relay. In each
// pair, two processes with the same configuration drain the same backlog. Both have the listeners, but only
// one of them gets requests. The order alternates, because servers drift. RunObserved takes minutes. The end
// of ctx interrupts it.
func RunObserved(ctx context.Context, options Options) (res ObservedResult, err error) {
	if options.Pairs == 0 {
		options.Pairs = DefaultPairs
	}
	err = options.withServers(ctx, func(bench *bench) error {
		if err := bench.fillBacklogs(ctx); err != nil {
			return err
		}

		bench.logProgress("warming the servers up")
		if _, _, err := bench.drainWatched(ctx, "warm", looked); err != nil {
			return fmt.Errorf("drain: %w", err)
		}

		got, otherCPU, sum := figures{}, figures{}, seen{}
		for pair := 1; pair <= bench.Pairs; pair++ {
			if err := bench.drainPair(ctx, pair, got, otherCPU, &sum); err != nil {
				return err
			}
		}

		res = newObservedResult(bench, got, otherCPU, sum)
		return nil
	})
	return res, err
}

const (
	alone  = "alone"
	looked = "observed"
)

// drainPair makes one drain alone and one observed drain.
func (b *bench) drainPair(ctx context.Context, pair int, got, otherCPU figures, sum *seen) error {
	order := []string{alone, looked}
	if pair%2 == 0 {
		slices.Reverse(order)
	}

	eps := map[string]float64{}
	for _, name := range order {
		drained, seen, err := b.drainWatched(ctx, fmt.Sprintf("%s%d", name, pair), name)
		if err != nil {
			return fmt.Errorf("drain: %w", err)
		}

		eps[name] = drained.eps
		got.addValue(name, drained.eps)
		got.addValue(name+"_cpu", drained.cpuPerMillion)
		got.addValue(name+"_rss", drained.peak)
		if drained.known {
			otherCPU.addValue(name, drained.otherCPU)
		}

		sum.scrapes += seen.scrapes
		sum.refreshes += seen.refreshes
		sum.messages += seen.messages
		b.logProgress("pair %d of %d: %-8s %8.0f/s  CPU of others %.1f %%  %.2f CPU-s per million  %.1f MB",
			pair, b.Pairs, name, drained.eps, drained.otherCPU, drained.cpuPerMillion, drained.peak)
	}
	b.logProgress("pair %d of %d: ratio %.3f", pair, b.Pairs, eps[looked]/eps[alone])
	return nil
}

func newObservedResult(bench *bench, got, otherCPU figures, sum seen) ObservedResult {
	result := ObservedResult{
		AloneEPS: round(median(got[alone]), 0), ObservedEPS: round(median(got[looked]), 0), Ratio: got.medianRatio(looked, alone),
		CPUAlone: round(median(got[alone+"_cpu"]), 2), CPUObserved: round(median(got[looked+"_cpu"]), 2),
		RSSAlone: round(median(got[alone+"_rss"]), 1), RSSObserved: round(median(got[looked+"_rss"]), 1),
		Scrapes: sum.scrapes, Refreshes: sum.refreshes, Messages: sum.messages,
		OtherCPU: newOtherCPU(otherCPU), Pairs: bench.Pairs, Events: bench.Events, Payload: bench.Payload,
	}

	for i := range got[alone] {
		result.Ratios = append(result.Ratios, round(got[looked][i]/got[alone][i], 3))
	}
	return result
}

// Print writes the result as a table for people.
func (r ObservedResult) Print(out io.Writer) error {
	table := tabwriter.NewWriter(out, 0, 8, 2, ' ', 0)
	row := func(name, format string, args ...any) {
		fmt.Fprintf(table, "%s\t%s\n", name, fmt.Sprintf(format, args...))
	}

	fmt.Fprintf(table, "\n%d events of %d bytes, medians of %d pairs\t\n", r.Events, r.Payload, r.Pairs)
	row("drain, no requests", "%.0f events/s, %.2f CPU-s per million, %.1f MB", r.AloneEPS, r.CPUAlone, r.RSSAlone)
	row("page open, scraped every second", "%.0f events/s, %.2f CPU-s per million, %.1f MB",
		r.ObservedEPS, r.CPUObserved, r.RSSObserved)
	row("ratio", "%.3f, from %.3f to %.3f", r.Ratio, slices.Min(r.Ratios), slices.Max(r.Ratios))
	row("requests", "%d scrapes, %d refreshes of the page, %d messages of its live stream",
		r.Scrapes, r.Refreshes, r.Messages)

	row("CPU of others", "%s", r.describeOtherCPU())
	return table.Flush()
}

// drainWatched drains the backlog once, alone or observed.
func (b *bench) drainWatched(ctx context.Context, name, mode string) (drained drained, seen seen, err error) {
	var observer *observer
	drained, err = b.drainBeside(ctx, name, setting{page: true}, func(relay *relay) {
		if mode == looked {
			observer = startObserver(ctx, relay)
		}
	}, func() error {
		if observer == nil {
			return nil
		}
		seen, err = observer.stopObserving(ctx)
		return err
	})
	return drained, seen, err
}
