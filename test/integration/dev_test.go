//go:build unix

package integration

import (
	"bufio"
	"bytes"
	"encoding/json"
	"io"
	"os/exec"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/test/kit"
)

// The demo with two kills exits with 0, and its JSON object reports that no event was lost, repeated or out of
// order.
func TestDevCommandSurvivesKills(t *testing.T) {
	t.Parallel()
	binary := kit.Binary(t)
	env := sharedServersEnv(t)
	ctx, cancel := kit.Context(t)
	defer cancel()
	var out, errOut bytes.Buffer
	cmd := exec.CommandContext(ctx, binary, "dev", "--events", "400", "--rate", "100", "--kill-every", "2s", "--json")
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	cmd.WaitDelay = 20 * time.Second
	cmd.Env, cmd.Stdout, cmd.Stderr = env, &out, &errOut
	if err := cmd.Run(); err != nil {
		t.Fatalf("%v\n%s%s", err, out.String(), errOut.String())
	}

	var r map[string]float64
	d := json.NewDecoder(&out)
	if err := d.Decode(&r); err != nil {
		t.Fatal(err)
	}
	if _, err := d.Token(); err != io.EOF {
		t.Errorf("more than one object on standard output: %v", err)
	}

	want := []string{"delivered", "duplicates", "events", "lost", "max_gap_ms", "out_of_order", "p50_ms", "p99_ms", "takeovers"}
	var names []string
	for name := range r {
		names = append(names, name)
	}

	slices.Sort(names)
	if !slices.Equal(names, want) {
		t.Errorf("fields %q, want %q", names, want)
	}
	if r["events"] != 400 || r["delivered"] != 400 || r["lost"]+r["duplicates"]+r["out_of_order"] != 0 || r["takeovers"] < 2 || r["p50_ms"] < 0 || r["p99_ms"] < r["p50_ms"] {
		t.Errorf("%v\n%s", r, errOut.String())
	}
	// At least one event waits for a takeover, but that does not show in the median. The median is 0 if most
	// records arrive before their commit is confirmed.
	if r["max_gap_ms"] <= r["p50_ms"] {
		t.Errorf("the longest wait was %v ms, with two kills and a median of %v ms", r["max_gap_ms"], r["p50_ms"])
	}
	if n := strings.Count(errOut.String(), "killed a-"); n < 2 {
		t.Errorf("%d kills, want at least 2\n%s", n, errOut.String())
	}
}

// Ctrl-C ends the demo with a clean result, also with --keep, and leaves no process running. An owner that is stopped by SIGTERM leaves
// nothing to read back, and the demo reports none. The test starts its own servers, as the demo does by default.
func TestDevCommandStopsAll(t *testing.T) {
	t.Parallel()
	binary := kit.Binary(t)
	stacktest.LockMachine(t)
	ctx, cancel := kit.Context(t)
	defer cancel()
	cmd := exec.CommandContext(ctx, binary, "dev", "--rate", "50", "--keep")
	errOut, err := cmd.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}

	var pids []int
	var output []string
	relay := regexp.MustCompile(`relay a-\d+ +pid (\d+)`)
	lines, stopped, takeover := bufio.NewScanner(errOut), false, ""
	for lines.Scan() {
		output = append(output, lines.Text())
		if m := relay.FindStringSubmatch(lines.Text()); m != nil {
			pid, _ := strconv.Atoi(m[1])
			pids = append(pids, pid)
		}
		// The figures appear when everything runs. The owner starts first.
		if strings.HasPrefix(lines.Text(), " events ") && !stopped {
			stopped = true
			if err := syscall.Kill(pids[0], syscall.SIGTERM); err != nil {
				t.Error(err)
			}
		}
		// A second signal would end the demo at once.
		if strings.Contains(lines.Text(), " took over · epoch 2") && takeover == "" {
			takeover = lines.Text()
			if err := cmd.Process.Signal(syscall.SIGINT); err != nil {
				t.Error(err)
			}
		}
	}

	if err := cmd.Wait(); err != nil {
		t.Errorf("%v\n%s", err, strings.Join(output, "\n"))
	}
	if strings.Contains(takeover, "read back") || strings.Contains(takeover, "sent already") {
		t.Errorf("the owner was stopped, but its successor reports: %s", takeover)
	}
	if len(pids) != 2 || !strings.Contains(output[len(output)-1], "lost 0 · duplicate 0 · out of order 0") {
		t.Errorf("relays %v\n%s", pids, strings.Join(output, "\n"))
	}

	for _, pid := range pids {
		if err := syscall.Kill(pid, 0); err != syscall.ESRCH {
			t.Errorf("relay %d is still running: %v", pid, err)
		}
	}
}
