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

	OtherCPUPct float64      `json:"other_cpu_pct"` // the greatest of the medians of the systems; -1 if it is unknown
	Systems     []PeerSystem `json:"systems"`
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
	result := PeersResult{
		Date: time.Now().UTC().Format(time.DateOnly), Machine: Machine{cpuModel(), runtime.NumCPU(), runtime.GOOS + "/" + runtime.GOARCH},
		Events: b.Events, Payload: b.Payload, Runs: b.Runs, Rates: b.Rates, Seconds: int(b.Duration.Seconds()), OtherCPUPct: -1,
	}
	for i, s := range list {
		system := PeerSystem{Name: s.name, Title: s.title, Rounds: got[i], Median: medianRun(got[i])}
		var ratios []float64
		for round, run := range got[i] {
			ratios = append(ratios, run.DrainEPS/got[0][round].DrainEPS)
		}
		system.DrainRatio = round(median(ratios), 3)
		result.Systems = append(result.Systems, system)
		result.OtherCPUPct = max(result.OtherCPUPct, system.Median.OtherCPU)
	}

	var build struct {
		Version string `bson:"version"`
	}
	if err := b.client.Database("admin").RunCommand(ctx, bson.D{{Key: "buildInfo", Value: 1}}).Decode(&build); err != nil {
		return result, fmt.Errorf("reading the version of MongoDB: %w", err)
	}
	result.Versions = map[string]string{"mongodb": build.Version, "go": runtime.Version(), "kafka_connect": kafkaconnect.Version("connect")}
	if b.stack != nil {
		for _, s := range b.stack.Servers() {
			if s.Version != "" && s.Name != "mongod" {
				result.Versions[strings.ToLower(s.Name)] = s.Version
			}
		}
	}
	for _, name := range b.Peers {
		result.Versions[name] = kafkaconnect.Version(name)
	}
	return result, nil
}

// medianRun returns the median of each figure.
func medianRun(runs []peerRun) peerRun {
	of := func(figure func(peerRun) float64, decimals int) float64 {
		var values []float64
		for _, r := range runs {
			values = append(values, figure(r))
		}
		return round(median(values), decimals)
	}

	run := peerRun{
		DrainEPS:      of(func(peerRun peerRun) float64 { return peerRun.DrainEPS }, 0),
		CPUPerMillion: of(func(peerRun peerRun) float64 { return peerRun.CPUPerMillion }, 2),
		MongodCPU:     of(func(peerRun peerRun) float64 { return peerRun.MongodCPU }, 2),
		PeakRSS:       of(func(peerRun peerRun) float64 { return peerRun.PeakRSS }, 1),
		SilenceMS:     of(func(peerRun peerRun) float64 { return peerRun.SilenceMS }, 0),
		Repeats:       int(of(func(peerRun peerRun) float64 { return float64(peerRun.Repeats) }, 0)),
		Lost:          int(of(func(peerRun peerRun) float64 { return float64(peerRun.Lost) }, 0)),
		OtherCPU:      of(func(peerRun peerRun) float64 { return peerRun.OtherCPU }, 1),
	}

	for i, l := range runs[0].Latency {
		run.Latency = append(run.Latency, peerLatency{
			Rate: l.Rate,
			P50:  of(func(peerRun peerRun) float64 { return peerRun.Latency[i].P50 }, 2),
			P99:  of(func(peerRun peerRun) float64 { return peerRun.Latency[i].P99 }, 2),
		})
	}
	return run
}

// cpuModel returns the name of the processor, or that of its architecture.
func cpuModel() string {
	file, err := os.Open("/proc/cpuinfo")
	if err != nil {
		return runtime.GOARCH
	}
	defer file.Close()
	for lines := bufio.NewScanner(file); lines.Scan(); {
		if name, value, ok := strings.Cut(lines.Text(), ":"); ok && strings.TrimSpace(name) == "model name" {
			return strings.TrimSpace(value)
		}
	}
	return runtime.GOARCH
}

// Print writes the table of docs/bench.md.
func (r PeersResult) Print(out io.Writer) error {
	_, err := io.WriteString(out, r.Markdown())
	return err
}

// Markdown returns the table of docs/bench.md: the circumstances of the figures, and the medians of each system.
func (r PeersResult) Markdown() string {
	rounds := fmt.Sprintf("medians of %d interleaved rounds", r.Runs)
	if r.Runs == 1 {
		rounds = "one round"
	}
	versions := "MongoDB " + r.Versions["mongodb"]
	if version := r.Versions["kafka"]; version != "" {
		versions += ", Kafka " + version
	}

	var builder strings.Builder
	fmt.Fprintf(&builder, "`outrelay bench --peers` on %s, %s with %d cores for servers and publishers, %s, Kafka Connect %s in standalone mode: "+
		"%s events with payloads of %s bytes, latencies for %d s at each rate, %s.",
		r.Date, r.Machine.CPU, r.Machine.Cores, versions, r.Versions["kafka_connect"], formatThousands(float64(r.Events)), formatThousands(float64(r.Payload)), r.Seconds, rounds)
	if r.OtherCPUPct >= 0 {
		fmt.Fprintf(&builder, " Other programs used up to %.0f %% of the machine during the drains.", r.OtherCPUPct)
	}
	// The kill comes at the same moment of each round, so the medians say nothing about the other moments.
	fmt.Fprintf(&builder, " Kafka Connect stores its offsets every %.0f s: a kill repeats 0 to %s events, which depends on its moment.",
		offsetInterval.Seconds(), formatThousands(offsetInterval.Seconds()*killRate))
	builder.WriteString("\n\n")
	r.writeHead(&builder)
	for _, s := range r.Systems {
		writeRow(&builder, s.Title, s.DrainRatio, s.Median)
	}
	return builder.String()
}

// writeHead writes the head of a table.
func (r PeersResult) writeHead(builder *strings.Builder) {
	builder.WriteString("| system | drain, events/s (÷ outrelay) |")
	for _, rate := range r.Rates {
		fmt.Fprintf(builder, " p50 / p99 ms at %s/s |", formatThousands(float64(rate)))
	}
	builder.WriteString(" CPU-s per million: publisher, MongoDB | peak memory, MiB | `kill -9` at 1,000/s, restarted at once |\n|---|---|")
	builder.WriteString(strings.Repeat("---|", len(r.Rates)+3) + "\n")
}

// writeRow writes the figures of a system as a row of a table.
func writeRow(builder *strings.Builder, title string, ratio float64, run peerRun) {
	fmt.Fprintf(builder, "| %s | %s (%.2f) |", title, formatThousands(run.DrainEPS), ratio)
	for _, l := range run.Latency {
		fmt.Fprintf(builder, " %s / %s |", formatDigits(l.P50), formatDigits(l.P99))
	}
	fmt.Fprintf(builder, " %s, %s | %s | silent %.1f s, %s repeats", formatDigits(run.CPUPerMillion), formatDigits(run.MongodCPU), formatThousands(run.PeakRSS), run.SilenceMS/1000, formatThousands(float64(run.Repeats)))
	if run.Lost > 0 {
		fmt.Fprintf(builder, ", %s lost", formatThousands(float64(run.Lost)))
	}
	builder.WriteString(" |\n")
}

// formatDigits prints a figure with about two significant digits.
func formatDigits(value float64) string {
	switch {
	case value < 0:
		return "unknown"
	case value < 10:
		return fmt.Sprintf("%.1f", value)
	}
	return formatThousands(value)
}

// formatThousands prints a figure without decimals, with a comma after each three digits.
func formatThousands(value float64) string {
	text := fmt.Sprintf("%.0f", value)
	for i := len(text) - 3; i > 0; i -= 3 {
		text = text[:i] + "," + text[i:]
	}
	return text
}
