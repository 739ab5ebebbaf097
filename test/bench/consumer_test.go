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

// TestBenchConsumerCommand runs the benchmark of the consumer in small, and reads its object as others will. What it does
// not check are rates: the machine may be busy.
func TestBenchConsumerCommand(t *testing.T) {
	t.Parallel()
	binary := kit.Binary(t, "")
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Second)
	defer cancel()
	var out, errOut bytes.Buffer
	cmd := exec.CommandContext(ctx, binary, "bench", "--consumer", "--events", "240", "--runs", "1", "--json",
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
		"naive_eps", "consumer_eps", "ratio", "none_eps", "inbox_ratio", "messages_per_transaction",
		"none_p50_ms", "none_p99_ms", "inbox_p50_ms", "inbox_p99_ms",
	} {
		if v, _ := r[name].(float64); v <= 0 {
			t.Errorf("%s is %v", name, r[name])
		}
	}
	for _, name := range []string{"overhead_p50_ms", "overhead_p99_ms", "naive_cpu_ms", "consumer_cpu_ms", "consumer_servers_cpu_ms", "foreign_cpu_pct"} {
		if _, ok := r[name].(float64); !ok {
			t.Errorf("%s is %v", name, r[name])
		}
	}
	if v, _ := r["messages_per_transaction"].(float64); v <= 1 {
		t.Errorf("%v messages share a transaction", v)
	}
	if t.Failed() {
		t.Log(&errOut)
	}
}
