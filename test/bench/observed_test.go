//go:build unix

package bench

import (
	"strings"
	"testing"

	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
)

// TestBenchObservedCommand drains pairs at a small size, and decodes the JSON object like a user. It checks the
// counters of observers: each observed drain has had responses of the page, its live stream and /metrics.
func TestBenchObservedCommand(t *testing.T) {
	t.Parallel()
	stacktest.OnlyWith(t, "it starts servers several times", "slow")
	var r struct {
		Alone      float64            `json:"alone_eps"`
		Observed   float64            `json:"observed_eps"`
		Ratio      float64            `json:"ratio"`
		Ratios     []float64          `json:"ratios"`
		Scrapes    int                `json:"scrapes"`
		Refreshes  int                `json:"refreshes"`
		Messages   int                `json:"live_messages"`
		OtherCPU   float64            `json:"other_cpu_pct"`
		OtherCPUOf map[string]float64 `json:"other_cpu"`
		Pairs      int                `json:"pairs"`
		Events     int                `json:"events"`
	}
	output := runBench(t, &r, "--observed", "--events", "2000", "--pairs", "2")
	if r.Alone <= 0 || r.Observed <= 0 || r.Pairs != 2 || r.Events != 2000 || len(r.Ratios) != 2 {
		t.Fatalf("%+v", r)
	}
	if least, most := min(r.Ratios[0], r.Ratios[1]), max(r.Ratios[0], r.Ratios[1]); least <= 0 || r.Ratio < least || r.Ratio > most {
		t.Errorf("the median %v is not one of %v", r.Ratio, r.Ratios)
	}
	if r.Scrapes < 2 || r.Refreshes < 2 || r.Messages < 2 {
		t.Errorf("two drains had %d scrapes, %d refreshes, %d messages", r.Scrapes, r.Refreshes, r.Messages)
	}
	if r.OtherCPU != -1 && (r.OtherCPU < 0 || r.OtherCPU > 100 || len(r.OtherCPUOf) != 2) {
		t.Errorf("CPU of others %v %%: %v", r.OtherCPU, r.OtherCPUOf)
	}

	// The order within pairs alternates.
	at := func(text string) int {
		i := strings.Index(output, text)
		if i < 0 {
			t.Fatalf("output without %q:\n%s", text, output)
		}
		return i
	}

	if at("pair 1 of 2: alone") > at("pair 1 of 2: observed") || at("pair 2 of 2: observed") > at("pair 2 of 2: alone") {
		t.Errorf("the order within pairs does not alternate:\n%s", output)
	}
}
