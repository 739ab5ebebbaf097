//go:build unix

package integration

import (
	"bytes"
	"encoding/json"
	"flag"
	"io"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/outrelay/outrelay/internal/lab/devstack"
	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/test/kit"
)

var long = flag.Bool("integration.long", false, "run all scenarios of dev, at their full size")

// sharedServersEnv returns the environment of an `outrelay dev` that uses the shared test servers.
func sharedServersEnv(t *testing.T) []string {
	t.Helper()
	return append(os.Environ(), devstack.EnvMongoDB+"="+stacktest.MongoURI(t), devstack.EnvKafka+"="+strings.Join(stacktest.Brokers(t), ","))
}

// runScenario runs `outrelay dev --scenario` on the shared servers, or at full size on dedicated servers, and
// returns its JSON object. The promise must hold.
func runScenario(t *testing.T, name string, args ...string) map[string]any {
	t.Helper()
	t.Parallel()
	binary := kit.Binary(t)
	env := os.Environ()
	if *long {
		args = nil
		stacktest.LockMachine(t)
	} else {
		env = sharedServersEnv(t)
	}

	ctx, cancel := kit.Context(t)
	defer cancel()
	var out, errOut bytes.Buffer
	cmd := exec.CommandContext(ctx, binary, append([]string{"dev", "--json", "--scenario", name}, args...)...)
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	cmd.WaitDelay = 20 * time.Second
	cmd.Env, cmd.Stdout, cmd.Stderr = env, &out, &errOut
	if err := cmd.Run(); err != nil {
		t.Fatalf("%v\n%s%s", err, out.String(), errOut.String())
	}

	t.Logf("%s", out.String())
	var r map[string]any
	d := json.NewDecoder(&out)
	if err := d.Decode(&r); err != nil {
		t.Fatal(err)
	}
	if _, err := d.Token(); err != io.EOF {
		t.Errorf("more than one object on standard output: %v", err)
	}
	if r["held"] != true || r["events"] == 0.0 || r["events"] != r["delivered"] {
		t.Errorf("exit code 0 although the promise is violated: %v", r)
	}

	for _, nothing := range []string{"lost", "duplicates", "out_of_order", "phantoms"} {
		if r[nothing] != 0.0 {
			t.Errorf("%s: %v", nothing, r[nothing])
		}
	}
	return r
}

// expectAbove checks that figures are greater than least, so that the scenario has really run.
func expectAbove(t *testing.T, r map[string]any, least float64, names ...string) {
	t.Helper()
	for _, n := range names {
		if v, ok := r[n].(float64); !ok || v <= least {
			t.Errorf("%s is %v, want more than %v", n, r[n], least)
		}
	}
}

// Malformed, too large, forbidden, misdirected and expired envelopes become dead letters of their class. All
// good ones among them are delivered.
func TestScenarioPoison(t *testing.T) {
	r := runScenario(t, "poison", "--events", "200", "--rate", "200")
	expectAbove(t, r, 0, "poisoned", "dead")
	classes, _ := r["classes"].(map[string]any)
	for _, c := range []string{"malformed", "message_too_large", "not_allowed", "partition_out_of_range", "expired"} {
		expectAbove(t, classes, 0, c)
	}
	if r["dead"] != r["poisoned"] {
		t.Errorf("%v dead letters, want %v", r["dead"], r["poisoned"])
	}
}

// The owner is killed while scheduled events become due.
func TestScenarioScheduled(t *testing.T) {
	r := runScenario(t, "scheduled", "--events", "1000")
	// On a slow machine, the takeover may delay all envelopes, and p99_ms leaves those out.
	expectAbove(t, r, 0, "cancelled", "rescheduled", "takeovers", "all_p99_ms")
	if r["early"] != 0.0 {
		t.Errorf("%v", r)
	}
}

// One of two consumers is killed repeatedly, with duplicate records in the topic.
func TestScenarioConsumer(t *testing.T) {
	stacktest.OnlyWith(t, "test/fault injects the same faults", "slow", "integration.long")
	r := runScenario(t, "consumer", "--events", "400", "--rate", "150", "--kill-every", "2s")
	expectAbove(t, r, 0, "effects", "kills", "rebalances", "injected", "rejected")
	if r["effects"] != r["events"] {
		t.Errorf("%v effects of %v events", r["effects"], r["events"])
	}
	for _, nothing := range []string{"lost_effects", "double_effects", "strange_effects", "dead_effects"} {
		if r[nothing] != 0.0 {
			t.Errorf("%s: %v", nothing, r[nothing])
		}
	}
}

// The scenarios whose faults test/fault injects as well.
func TestScenariosOfOtherFaults(t *testing.T) {
	stacktest.OnlyWith(t, "test/fault injects the same faults", "slow", "integration.long")
	t.Parallel()
	for name, play := range map[string]func(*testing.T){
		"retry": retryScenario, "rebalances": rebalancesScenario,
	} {
		t.Run(name, play)
	}
}

// A topic is missing for some time, and Kafka rejects the first record of some keys.
func retryScenario(t *testing.T) {
	r := runScenario(t, "retry", "--rate", "150", "--events", "150")
	expectAbove(t, r, 0, "parked", "others_rate", "rejected", "blocked", "passed")
	expectAbove(t, r, 0.95, "others_share")
}

// A third consumer joins and leaves repeatedly.
func rebalancesScenario(t *testing.T) {
	// The load lasts for 20 seconds: on a busy machine, a join alone takes several.
	r := runScenario(t, "consumer", "--events", "2000", "--rate", "100", "--rebalance-every", "1s")
	expectAbove(t, r, 1, "effects", "rebalances")
	if r["effects"] != r["events"] || r["kills"] != 0.0 && !*long {
		t.Errorf("%v effects of %v events, %v kills", r["effects"], r["events"], r["kills"])
	}
}

// The scenarios at full size, on dedicated servers.
func TestScenariosOfFullSize(t *testing.T) {
	stacktest.OnlyWith(t, "each scenario takes a minute or two", "integration.long")
	t.Parallel()
	for _, name := range []string{"drop", "lost-history"} {
		t.Run(name, func(t *testing.T) {
			r := runScenario(t, name)
			switch name {
			case "drop":
				expectAbove(t, r, 2, "drops")
				if r["redelivered"] != 0.0 || r["takeovers"] != 0.0 {
					t.Errorf("%v", r)
				}

			case "lost-history":
				expectAbove(t, r, 100_000, "orphaned")
				expectAbove(t, r, r["orphaned"].(float64)-1, "redelivered")
			}
		})
	}
}

// An unknown name is an error that lists the known names, before any server starts.
func TestScenarioNames(t *testing.T) {
	t.Parallel()
	for _, args := range [][]string{{"--scenario", "nonsense"}, {"--scenario", ""}, {"--scenario", "saga"}, {"--scenario", "drop", "--keep"}, {"--scenario", "drop", "--kill-every", "2s"}, {"--scenario", "retry", "--rebalance-every", "2s"}, {"--rebalance-every", "2s"}} {
		code, out, errOut := kit.RunCommand(t, nil, append([]string{"dev"}, args...)...)
		if code != 1 || out != "" || errOut == "" {
			t.Errorf("dev %q: exit code %d\n%s%s", args, code, out, errOut)
		}

		if len(args) == 2 && args[0] == "--scenario" {
			known := []string{"consumer", "drop", "lost-history", "poison", "retry", "scheduled"}
			if args[1] == "saga" {
				known = []string{"TestSagaNodesDie"} // which has replaced it
			}
			for _, n := range known {
				if !bytes.Contains([]byte(errOut), []byte(n)) {
					t.Errorf("the error of dev %q does not list %s: %s", args, n, errOut)
				}
			}
		}
	}
}
