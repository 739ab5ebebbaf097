//go:build unix

package bench

import (
	"testing"

	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
)

// TestBenchConsumerCommand runs the benchmark of the consumer at a small size, and decodes its JSON object like
// a user. It does not check rates, because the machine may be busy.
func TestBenchConsumerCommand(t *testing.T) {
	t.Parallel()
	var r map[string]any
	runBench(t, &r, "--consumer", "--events", "240", "--runs", "1")
	for _, name := range []string{
		"naive_eps", "marked_eps", "consumer_eps", "ratio", "marked_ratio", "none_eps", "inbox_ratio", "messages_per_transaction", "unbatched_eps", "unbatched_ratio",
		"none_p50_ms", "none_p99_ms", "inbox_p50_ms", "inbox_p99_ms",
	} {
		if v, _ := r[name].(float64); v <= 0 {
			t.Errorf("%s is %v", name, r[name])
		}
	}

	for _, name := range []string{"overhead_p50_ms", "overhead_p99_ms", "naive_cpu_ms", "consumer_cpu_ms", "consumer_servers_cpu_ms", "other_cpu_pct"} {
		if _, ok := r[name].(float64); !ok {
			t.Errorf("%s is %v", name, r[name])
		}
	}

	if v, _ := r["messages_per_transaction"].(float64); v <= 1 {
		t.Errorf("%v messages per transaction", v)
	}
}

// TestBenchTransportsCommand compares the libraries that join groups at a small size.
func TestBenchTransportsCommand(t *testing.T) {
	t.Parallel()
	stacktest.OnlyWith(t, "it starts servers several times", "slow")
	var r struct {
		Transports map[string]map[string]float64 `json:"transports"`
		RateRatio  float64                       `json:"rate_ratio"`
	}

	runBench(t, &r, "--consumer", "--transport", "kafka-go,franz", "--events", "240", "--runs", "1")
	for _, name := range []string{"kafka-go", "franz"} {
		for _, figure := range []string{"steady_eps", "moving_eps", "ratio"} {
			if r.Transports[name][figure] <= 0 {
				t.Errorf("%s of %s is %v", figure, name, r.Transports[name][figure])
			}
		}
	}
	if r.RateRatio <= 0 {
		t.Errorf("ratio of the rates: %v", r.RateRatio)
	}
}
