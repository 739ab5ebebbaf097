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

	ForeignCPUPct float64 `json:"foreign_cpu_pct"` // as in Result
	Events        int     `json:"events"`
	Payload       int     `json:"payload_bytes"`
	Runs          int     `json:"runs"`
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
func RunMembers(ctx context.Context, o Options) (res MembersResult, err error) {
	err = o.withServers(ctx, func(b *bench) error {
		topic, err := b.writeRecords(ctx)
		if err != nil {
			return err
		}
		defer b.cluster.deleteTopic(context.WithoutCancel(ctx), topic)

		got, foreign := figures{}, figures{}
		for run := 1; run <= b.Runs; run++ {
			for _, name := range b.Transports {
				for _, step := range []struct {
					name  string
					moves bool
				}{{"steady", false}, {"moving", true}} {
					s := spec{Mode: modeHandler, Topic: topic, Events: b.Events, Handling: handling{
						Inbox: true, Transport: name, Moves: step.moves,
					}}
					m, err := b.drainBy(ctx, name+"_"+step.name, s, run, got)
					if err != nil {
						return fmt.Errorf("%s, %s: %w", name, step.name, err)
					}
					if m.known {
						foreign.addValue("all", m.foreign)
					}
					b.logProgress("run %d of %d: %-8s %s %s  foreign CPU %.1f %%", run, b.Runs, name, step.name, m.words, m.foreign)
				}
			}
		}

		res = membersResult(b, got, foreign)
		return nil
	})
	return res, err
}

func membersResult(b *bench, got, foreign figures) MembersResult {
	r := MembersResult{
		Transports: map[string]MemberFigures{}, ForeignCPUPct: -1, Events: b.Events, Payload: b.Payload, Runs: b.Runs,
		RateRatio:  got.medianRatio(transportFranz+"_moving_eps", transportKafkaGo+"_moving_eps"),
		StallRatio: got.medianRatio(transportFranz+"_moving_stall", transportKafkaGo+"_moving_stall"),
	}

	for _, name := range b.Transports {
		r.Transports[name] = MemberFigures{
			SteadyEPS: round(median(got[name+"_steady_eps"]), 0),
			MovingEPS: round(median(got[name+"_moving_eps"]), 0),
			Ratio:     got.medianRatio(name+"_moving_eps", name+"_steady_eps"),
			StallMS:   round(median(got[name+"_moving_stall"]), 0),
			StalledMS: round(median(got[name+"_moving_stalled"]), 0),
		}
	}

	// The greatest share of all measurements.
	for _, v := range foreign["all"] {
		r.ForeignCPUPct = max(r.ForeignCPUPct, round(v, 1))
	}
	return r
}

// Print writes the result as a table for people.
func (r MembersResult) Print(w io.Writer) error {
	t := tabwriter.NewWriter(w, 0, 8, 2, ' ', 0)
	fmt.Fprintf(t, "\n%d records of %d bytes, medians of %d runs\t\n", r.Events, r.Payload, r.Runs)
	for _, name := range Transports() {
		f, ok := r.Transports[name]
		if !ok {
			continue
		}
		fmt.Fprintf(t, "%s\t%.0f records/s alone, %.0f while members join and leave (%.2f); longest stall %.0f ms, all stalls %.0f ms\n",
			name, f.SteadyEPS, f.MovingEPS, f.Ratio, f.StallMS, f.StalledMS)
	}
	if r.RateRatio > 0 {
		fmt.Fprintf(t, "franz ÷ kafka-go\trate %.2f, longest stall %.2f, while members join and leave\n", r.RateRatio, r.StallRatio)
	}
	if r.ForeignCPUPct >= 0 {
		fmt.Fprintf(t, "foreign CPU\t%.1f %% of the machine, in the worst measurement\n", r.ForeignCPUPct)
	}
	return t.Flush()
}
