package bench

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"os"
	"runtime"
	"strings"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/lab/devstack/kafkaconnect"
)

// PeersResult compares outrelay with other publishers: the medians of the rounds, and the figures of each round.
type PeersResult struct {
	Date     string            `json:"date"`
	Machine  Machine           `json:"machine"`
	Versions map[string]string `json:"versions"`

	Events  int   `json:"events"`
	Payload int   `json:"payload_bytes"`
	Runs    int   `json:"runs"`
	Rates   []int `json:"rates"`
	Seconds int   `json:"seconds"` // of each rate

	ForeignCPUPct float64      `json:"foreign_cpu_pct"` // the greatest of the medians of the systems; -1 if it is unknown
	Systems       []PeerSystem `json:"systems"`
}

// Machine describes the machine that servers and publishers share.
type Machine struct {
	CPU    string `json:"cpu"`
	Cores  int    `json:"cores"`
	System string `json:"system"`
}

// PeerSystem has the figures of a publisher with a setting.
type PeerSystem struct {
	Name  string `json:"name"`
	Title string `json:"title"`
	// DrainRatio is its rate ÷ that of outrelay with stamped documents in the same round; the median.
	DrainRatio float64   `json:"drain_ratio"`
	Median     peerRun   `json:"median"`
	Rounds     []peerRun `json:"rounds"`
}

// peerLatency is the time from the acknowledged insert to the arrival at a consumer, in milliseconds.
type peerLatency struct {
	Rate int     `json:"rate"`
	P50  float64 `json:"p50_ms"`
	P99  float64 `json:"p99_ms"`
}

func (b *comparison) newPeersResult(ctx context.Context, list []system, got [][]peerRun) (PeersResult, error) {
	r := PeersResult{
		Date: time.Now().UTC().Format(time.DateOnly), Machine: Machine{cpuModel(), runtime.NumCPU(), runtime.GOOS + "/" + runtime.GOARCH},
		Events: b.Events, Payload: b.Payload, Runs: b.Runs, Rates: b.Rates, Seconds: int(b.Duration.Seconds()), ForeignCPUPct: -1,
	}
	for i, s := range list {
		p := PeerSystem{Name: s.name, Title: s.title, Rounds: got[i], Median: medianRun(got[i])}
		var ratios []float64
		for round, run := range got[i] {
			ratios = append(ratios, run.DrainEPS/got[0][round].DrainEPS)
		}
		p.DrainRatio = round(median(ratios), 3)
		r.Systems = append(r.Systems, p)
		r.ForeignCPUPct = max(r.ForeignCPUPct, p.Median.ForeignCPU)
	}

	var build struct {
		Version string `bson:"version"`
	}
	if err := b.client.Database("admin").RunCommand(ctx, bson.D{{Key: "buildInfo", Value: 1}}).Decode(&build); err != nil {
		return r, fmt.Errorf("reading the version of MongoDB: %w", err)
	}
	r.Versions = map[string]string{"mongodb": build.Version, "go": runtime.Version(), "kafka_connect": kafkaconnect.Version("connect")}
	if b.stack != nil {
		for _, s := range b.stack.Servers() {
			if s.Version != "" && s.Name != "mongod" {
				r.Versions[strings.ToLower(s.Name)] = s.Version
			}
		}
	}
	for _, name := range b.Peers {
		r.Versions[name] = kafkaconnect.Version(name)
	}
	return r, nil
}

// medianRun returns the median of each figure.
func medianRun(runs []peerRun) peerRun {
	of := func(figure func(peerRun) float64, decimals int) float64 {
		var v []float64
		for _, r := range runs {
			v = append(v, figure(r))
		}
		return round(median(v), decimals)
	}

	m := peerRun{
		DrainEPS:      of(func(r peerRun) float64 { return r.DrainEPS }, 0),
		CPUPerMillion: of(func(r peerRun) float64 { return r.CPUPerMillion }, 2),
		MongodCPU:     of(func(r peerRun) float64 { return r.MongodCPU }, 2),
		PeakRSS:       of(func(r peerRun) float64 { return r.PeakRSS }, 1),
		SilenceMS:     of(func(r peerRun) float64 { return r.SilenceMS }, 0),
		Repeats:       int(of(func(r peerRun) float64 { return float64(r.Repeats) }, 0)),
		Lost:          int(of(func(r peerRun) float64 { return float64(r.Lost) }, 0)),
		ForeignCPU:    of(func(r peerRun) float64 { return r.ForeignCPU }, 1),
	}

	for i, l := range runs[0].Latency {
		m.Latency = append(m.Latency, peerLatency{
			Rate: l.Rate,
			P50:  of(func(r peerRun) float64 { return r.Latency[i].P50 }, 2),
			P99:  of(func(r peerRun) float64 { return r.Latency[i].P99 }, 2),
		})
	}
	return m
}

// cpuModel returns the name of the processor, or that of its architecture.
func cpuModel() string {
	f, err := os.Open("/proc/cpuinfo")
	if err != nil {
		return runtime.GOARCH
	}
	defer f.Close()
	for lines := bufio.NewScanner(f); lines.Scan(); {
		if name, value, ok := strings.Cut(lines.Text(), ":"); ok && strings.TrimSpace(name) == "model name" {
			return strings.TrimSpace(value)
		}
	}
	return runtime.GOARCH
}

// Print writes the table of docs/bench.md.
func (r PeersResult) Print(w io.Writer) error {
	_, err := io.WriteString(w, r.Markdown())
	return err
}

// Markdown returns the table of docs/bench.md: the circumstances of the figures, and the medians of each system.
func (r PeersResult) Markdown() string {
	rounds := fmt.Sprintf("medians of %d interleaved rounds", r.Runs)
	if r.Runs == 1 {
		rounds = "one round"
	}
	versions := "MongoDB " + r.Versions["mongodb"]
	if v := r.Versions["kafka"]; v != "" {
		versions += ", Kafka " + v
	}

	var b strings.Builder
	fmt.Fprintf(&b, "`outrelay bench --peers` on %s, %s with %d cores for servers and publishers, %s, Kafka Connect %s in standalone mode: "+
		"%s events with payloads of %s bytes, latencies for %d s at each rate, %s.",
		r.Date, r.Machine.CPU, r.Machine.Cores, versions, r.Versions["kafka_connect"], formatThousands(float64(r.Events)), formatThousands(float64(r.Payload)), r.Seconds, rounds)
	if r.ForeignCPUPct >= 0 {
		fmt.Fprintf(&b, " Other programs used up to %.0f %% of the machine during the drains.", r.ForeignCPUPct)
	}
	b.WriteString("\n\n")
	r.writeHead(&b)
	for _, s := range r.Systems {
		writeRow(&b, s.Title, s.DrainRatio, s.Median)
	}
	return b.String()
}

// writeHead writes the head of a table.
func (r PeersResult) writeHead(b *strings.Builder) {
	b.WriteString("| system | drain, events/s (÷ outrelay) |")
	for _, rate := range r.Rates {
		fmt.Fprintf(b, " p50 / p99 ms at %s/s |", formatThousands(float64(rate)))
	}
	b.WriteString(" CPU-s per million: publisher, MongoDB | peak memory, MiB | `kill -9` at 1,000/s, restarted at once |\n|---|---|")
	b.WriteString(strings.Repeat("---|", len(r.Rates)+3) + "\n")
}

// writeRow writes the figures of a system as a row of a table.
func writeRow(b *strings.Builder, title string, ratio float64, m peerRun) {
	fmt.Fprintf(b, "| %s | %s (%.2f) |", title, formatThousands(m.DrainEPS), ratio)
	for _, l := range m.Latency {
		fmt.Fprintf(b, " %s / %s |", formatDigits(l.P50), formatDigits(l.P99))
	}
	fmt.Fprintf(b, " %s, %s | %s | silent %.1f s, %s repeats", formatDigits(m.CPUPerMillion), formatDigits(m.MongodCPU), formatThousands(m.PeakRSS), m.SilenceMS/1000, formatThousands(float64(m.Repeats)))
	if m.Lost > 0 {
		fmt.Fprintf(b, ", %s lost", formatThousands(float64(m.Lost)))
	}
	b.WriteString(" |\n")
}

// formatDigits prints a figure with about two significant digits.
func formatDigits(v float64) string {
	switch {
	case v < 0:
		return "unknown"
	case v < 10:
		return fmt.Sprintf("%.1f", v)
	}
	return formatThousands(v)
}

// formatThousands prints a figure without decimals, with a comma after each three digits.
func formatThousands(v float64) string {
	s := fmt.Sprintf("%.0f", v)
	for i := len(s) - 3; i > 0; i -= 3 {
		s = s[:i] + "," + s[i:]
	}
	return s
}
