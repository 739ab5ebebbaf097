package bench

import (
	"context"
	"fmt"
	"io"
	"text/tabwriter"
	"time"
)

// The transports that [RunMembers] compares.
const (
	transportKafkaGo = "kafka-go"
	transportFranz   = "franz"
)

// Transports returns the names for Options.Transports.
func Transports() []string { return []string{transportKafkaGo, transportFranz} }

// memberTurn is how long a second member stays in the group, and how long it is away then.
const memberTurn = 4 * time.Second

// MembersResult has the medians of the runs of a benchmark of the transports.
type MembersResult struct {
	Transports map[string]MemberFigures `json:"transports"`

	// Franz ÷ kafka-go of the same run, if both were measured.
	RateRatio  float64 `json:"rate_ratio,omitempty"`  // of the rates while members join and leave
	StallRatio float64 `json:"stall_ratio,omitempty"` // of the longest stalls

	OtherCPUPct float64 `json:"other_cpu_pct"` // as in Result
	Events      int     `json:"events"`
	Payload     int     `json:"payload_bytes"`
	Runs        int     `json:"runs"`
}

// MemberFigures are the figures of one transport.
type MemberFigures struct {
	SteadyEPS float64 `json:"steady_eps"` // records per second of one member
	MovingEPS float64 `json:"moving_eps"` // while a second member joins and leaves
	Ratio     float64 `json:"ratio"`      // moving ÷ steady, of the same run
	StallMS   float64 `json:"stall_ms"`   // the longest time without a handled record, while members join and leave
	StalledMS float64 `json:"stalled_ms"` // the sum of all such times of 100 ms and more
}

// RunMembers compares transports: one member drains a topic, alone, and while a second one joins and leaves. It takes minutes.
// The end of ctx interrupts it.
func RunMembers(ctx context.Context, options Options) (res MembersResult, err error) {
	err = options.withServers(ctx, func(bench *bench) error {
		topic, err := bench.writeRecords(ctx)
		if err != nil {
			return err
		}
		defer bench.cluster.deleteTopic(context.WithoutCancel(ctx), topic)

		got, otherCPU := figures{}, figures{}
		for run := 1; run <= bench.Runs; run++ {
			for _, name := range bench.Transports {
				for _, step := range []struct {
					name  string
					moves bool
				}{{"steady", false}, {"moving", true}} {
					spec := spec{Mode: modeHandler, Topic: topic, Events: bench.Events, Handling: handling{
						Inbox: true, Transport: name, Moves: step.moves,
					}}
					reading, err := bench.drainBy(ctx, name+"_"+step.name, spec, run, got)
					if err != nil {
						return fmt.Errorf("%s, %s: %w", name, step.name, err)
					}
					if reading.known {
						otherCPU.addValue("all", reading.otherCPU)
					}
					bench.logProgress("run %d of %d: %-8s %s %s  CPU of others %.1f %%", run, bench.Runs, name, step.name, reading.words, reading.otherCPU)
				}
			}
		}

		res = membersResult(bench, got, otherCPU)
		return nil
	})
	return res, err
}

func membersResult(bench *bench, got, otherCPU figures) MembersResult {
	result := MembersResult{
		Transports: map[string]MemberFigures{}, OtherCPUPct: -1, Events: bench.Events, Payload: bench.Payload, Runs: bench.Runs,
		RateRatio:  got.medianRatio(transportFranz+"_moving_eps", transportKafkaGo+"_moving_eps"),
		StallRatio: got.medianRatio(transportFranz+"_moving_stall", transportKafkaGo+"_moving_stall"),
	}

	for _, name := range bench.Transports {
		result.Transports[name] = MemberFigures{
			SteadyEPS: round(median(got[name+"_steady_eps"]), 0),
			MovingEPS: round(median(got[name+"_moving_eps"]), 0),
			Ratio:     got.medianRatio(name+"_moving_eps", name+"_steady_eps"),
			StallMS:   round(median(got[name+"_moving_stall"]), 0),
			StalledMS: round(median(got[name+"_moving_stalled"]), 0),
		}
	}

	// The greatest share of all measurements.
	for _, v := range otherCPU["all"] {
		result.OtherCPUPct = max(result.OtherCPUPct, round(v, 1))
	}
	return result
}

// Print writes the result as a table for people.
func (r MembersResult) Print(out io.Writer) error {
	table := tabwriter.NewWriter(out, 0, 8, 2, ' ', 0)
	fmt.Fprintf(table, "\n%d records of %d bytes, medians of %d runs\t\n", r.Events, r.Payload, r.Runs)
	for _, name := range Transports() {
		figures, ok := r.Transports[name]
		if !ok {
			continue
		}
		fmt.Fprintf(table, "%s\t%.0f records/s alone, %.0f while members join and leave (%.2f); longest stall %.0f ms, all stalls %.0f ms\n",
			name, figures.SteadyEPS, figures.MovingEPS, figures.Ratio, figures.StallMS, figures.StalledMS)
	}
	if r.RateRatio > 0 {
		fmt.Fprintf(table, "franz ÷ kafka-go\trate %.2f, longest stall %.2f, while members join and leave\n", r.RateRatio, r.StallRatio)
	}
	if r.OtherCPUPct >= 0 {
		fmt.Fprintf(table, "CPU of others\t%.1f %% of the machine, in the worst measurement\n", r.OtherCPUPct)
	}
	return table.Flush()
}
