//go:build unix

package bench

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/outrelay/outrelay/internal/lab/bench"
	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
)

// The costs of more change streams at one rate: as slots of one outbox, and as watchers of as many outboxes.
func TestGrowthOfStreams(t *testing.T) {
	t.Parallel()
	stacktest.OnlyWith(t, "it starts servers several times", "slow")
	var r bench.GrowthResult
	dir := t.TempDir()
	runBench(t, &r, "--growth", "1,2", "--events", "300", "--seconds", "1", "--runs", "1", "--cpuprofile", filepath.Join(dir, "cpu"))
	if len(r.Steps) != 4 || r.Rate != bench.DefaultGrowthRate || r.Runs != 1 {
		t.Fatalf("%+v", r)
	}
	for i, want := range []bench.GrowthStep{{By: "slots", N: 1}, {By: "slots", N: 2}, {By: "watchers", N: 1}, {By: "watchers", N: 2}} {
		// An event that arrives before the acknowledgement of its insert counts as no delay.
		got := r.Steps[i]
		if got.By != want.By || got.N != want.N || got.P50 < 0 || got.P99 <= 0 || got.P99 < got.P50 {
			t.Errorf("step %d: %+v, want that of %d %s", i, got, want.N, want.By)
		}
	}

	// The warm-up, each number of slots, and each watcher.
	if profiles, err := os.ReadDir(dir); err != nil || len(profiles) != 1+2+3 {
		t.Errorf("%d profiles, want one of each relay: %v", len(profiles), err)
	}
}
