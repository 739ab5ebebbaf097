//go:build unix

package bench

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/outrelay/outrelay/internal/devstack/stacktest"
	"github.com/outrelay/outrelay/test/kit"
)

// TestBenchReconcilerCommand runs all that is measured beside the stream in small, and reads its object as others will.
func TestBenchReconcilerCommand(t *testing.T) {
	t.Parallel()
	binary := kit.Binary(t, "")
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Second)
	defer cancel()
	var out, errOut bytes.Buffer
	cmd := exec.CommandContext(ctx, binary, "bench", "--reconciler", "--events", "600", "--runs", "1", "--json",
		"--mongodb", stacktest.MongoURI(t), "--kafka", strings.Join(stacktest.Brokers(t), ","))
	cmd.Stdout, cmd.Stderr = &out, &errOut
	if err := cmd.Run(); err != nil {
		t.Fatalf("%v\n%s%s", err, &out, &errOut)
	}
	d := json.NewDecoder(&out)
	var r map[string]any
	if err := d.Decode(&r); err != nil {
		t.Fatal(err)
	}
	if _, err := d.Token(); err != io.EOF {
		t.Errorf("more than one object on standard output: %v", err)
	}
	for _, name := range []string{
		"drain_eps", "scheduled_eps", "scheduled_ratio", "known_eps", "known_ratio", "due_error_p50_ms", "due_error_p99_ms",
		"due_burst_s", "due_burst_limit_s", "sweep_eps", "sweep_peak_rss_mb", "budget_mb", "parked_eps", "purge_eps",
	} {
		if v, _ := r[name].(float64); v <= 0 {
			t.Errorf("%s is %v", name, r[name])
		}
	}
	if p50, p99 := r["due_error_p50_ms"].(float64), r["due_error_p99_ms"].(float64); p50 > p99 {
		t.Errorf("due error: p50 %v ms, p99 %v ms", p50, p99)
	}
	if t.Failed() {
		t.Log(&errOut)
	}
}
