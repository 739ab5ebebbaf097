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

// TestBenchObservedCommand drains in pairs in small, and reads its object as others will. That somebody looked is counted, not
// believed: every observed drain has had an answer of the page, its live stream and /metrics.
func TestBenchObservedCommand(t *testing.T) {
	t.Parallel()
	binary := kit.Binary(t, "")
	ctx, cancel := context.WithTimeout(t.Context(), 150*time.Second)
	defer cancel()
	var out, errOut bytes.Buffer
	cmd := exec.CommandContext(ctx, binary, "bench", "--observed", "--events", "2000", "--pairs", "2", "--json",
		"--mongodb", stacktest.MongoURI(t), "--kafka", strings.Join(stacktest.Brokers(t), ","))
	cmd.Stdout, cmd.Stderr = &out, &errOut
	if err := cmd.Run(); err != nil {
		t.Fatalf("%v\n%s%s", err, &out, &errOut)
	}
	var r struct {
		Alone     float64            `json:"alone_eps"`
		Observed  float64            `json:"observed_eps"`
		Ratio     float64            `json:"ratio"`
		Ratios    []float64          `json:"ratios"`
		Scrapes   int                `json:"scrapes"`
		Refreshes int                `json:"refreshes"`
		Messages  int                `json:"live_messages"`
		Foreign   float64            `json:"foreign_cpu_pct"`
		ForeignOf map[string]float64 `json:"foreign_cpu"`
		Pairs     int                `json:"pairs"`
		Events    int                `json:"events"`
	}
	d := json.NewDecoder(&out)
	if err := d.Decode(&r); err != nil {
		t.Fatal(err)
	}
	if _, err := d.Token(); err != io.EOF {
		t.Errorf("more than one object on standard output: %v", err)
	}
	if r.Alone <= 0 || r.Observed <= 0 || r.Pairs != 2 || r.Events != 2000 || len(r.Ratios) != 2 {
		t.Fatalf("%+v", r)
	}
	if least, most := min(r.Ratios[0], r.Ratios[1]), max(r.Ratios[0], r.Ratios[1]); least <= 0 || r.Ratio < least || r.Ratio > most {
		t.Errorf("the median %v is none of %v", r.Ratio, r.Ratios)
	}
	if r.Scrapes < 2 || r.Refreshes < 2 || r.Messages < 2 {
		t.Errorf("in two drains %d scrapes, %d refreshes, %d messages", r.Scrapes, r.Refreshes, r.Messages)
	}
	if r.Foreign != -1 && (r.Foreign < 0 || r.Foreign > 100 || len(r.ForeignOf) != 2) {
		t.Errorf("foreign CPU %v %%: %v", r.Foreign, r.ForeignOf)
	}
	// What comes first alternates.
	said := errOut.String()
	at := func(text string) int {
		i := strings.Index(said, text)
		if i < 0 {
			t.Fatalf("never said %q:\n%s", text, said)
		}
		return i
	}
	if at("pair 1 of 2: alone") > at("pair 1 of 2: observed") || at("pair 2 of 2: observed") > at("pair 2 of 2: alone") {
		t.Errorf("the order within pairs does not alternate:\n%s", said)
	}
}
