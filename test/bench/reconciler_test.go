//go:build unix

package bench

import (
	"testing"

	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
)

// TestBenchReconcilerCommand runs all measurements outside of the stream at a small size, and decodes the JSON
// object like a user.
func TestBenchReconcilerCommand(t *testing.T) {
	t.Parallel()
	stacktest.OnlyWith(t, "it starts servers several times", "slow")
	var r map[string]any
	runBench(t, &r, "--reconciler", "--events", "600", "--runs", "1")
	for _, name := range []string{
		"drain_eps", "scheduled_eps", "scheduled_ratio", "known_eps", "known_ratio", "due_error_p50_ms", "due_error_p99_ms", "raw_due_p50_ms", "raw_due_p99_ms",
		"due_burst_s", "due_burst_limit_s", "sweep_eps", "sweep_peak_rss_mb", "budget_mb", "parked_eps", "purge_eps",
	} {
		if v, _ := r[name].(float64); v <= 0 {
			t.Errorf("%s is %v", name, r[name])
		}
	}

	if p50, p99 := r["due_error_p50_ms"].(float64), r["due_error_p99_ms"].(float64); p50 > p99 {
		t.Errorf("due error: p50 %v ms, p99 %v ms", p50, p99)
	}
}
