//go:build unix

package integration

import (
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/test/kit"
)

// The commands of an operator while a relay and a standby run.
func TestCommandsOnALiveRelay(t *testing.T) {
	t.Parallel()
	s := kit.New(t, kit.Options{})
	history := s.FollowWatcher()
	topics := s.ReadTopics()
	owner := s.StartRelay()
	owner.WaitTookOver()
	s.StartLoad(kit.Load{Events: 50}).WaitDone()
	s.CheckDelivery(topics)
	history.WaitFor("state live", func(v kit.Version) bool { return strings.Contains(v.Stats.String(), `"live"`) })
	st := s.ReadStatus()
	if st.Node != owner.Node || !strings.HasPrefix(st.Owner, owner.Node+"/") || st.State != "live" || st.Epoch < 1 || len(st.Unwritable) != 0 {
		t.Errorf("status of a live relay: %+v", st)
	}

	for path, want := range map[string]string{"/livez": "", "/readyz": `"owner"`, "/metrics": "outrelay_lease_owner 1"} {
		waitForResponse(t, owner, path, want)
	}

	owner, standby := s.StartStandby(owner)
	waitForResponse(t, standby, "/readyz", `"standby"`)
	if code, out, errOut := s.RunCommand("validate"); code != 0 || errOut != "" || !strings.Contains(out, "ok") {
		t.Errorf("validate: exit code %d, output %q, errors %q", code, out, errOut)
	}

	owner.Kill()
	if st := s.ReadStatus(); st.Node != owner.Node && st.Node != standby.Node {
		t.Errorf("status after a kill: %+v", st)
	}

	standby.WaitTookOver()
	if now := s.ReadStatus(); now.Node != standby.Node || now.Epoch <= st.Epoch {
		t.Errorf("status after a takeover: %+v; before: %+v", now, st)
	}

	history.CheckHistory()
}

// waitForResponse waits until a process returns status 200 and a text for a path. On a busy machine a
// lease may be in doubt for a moment.
func waitForResponse(t *testing.T, p *kit.Process, path, want string) {
	t.Helper()
	stacktest.Eventually(t, fmt.Sprintf("GET %s of %s with %q", path, p.Node, want), func() bool {
		code, body := p.Get(path)
		return code == http.StatusOK && strings.Contains(body, want)
	})
}

func TestDoctorOnALiveRelay(t *testing.T) {
	t.Parallel()
	s := kit.New(t, kit.Options{})
	s.StartRelay().WaitTookOver()
	code, out, errOut := s.RunCommand("doctor", "--json")
	var report struct {
		Checks []struct{ ID, Status, Detail, Fix string }
	}
	if err := json.Unmarshal([]byte(out), &report); err != nil {
		t.Fatalf("doctor --json: exit code %d, %v\n%s%s", code, err, out, errOut)
	}

	failed := 0
	for _, c := range report.Checks {
		if c.Status == "fail" {
			failed++
			t.Logf("%s: %s (%s)", c.ID, c.Detail, c.Fix)
		}
		if c.Status != "ok" && c.Fix == "" {
			t.Errorf("check %s is %s without a fix: %s", c.ID, c.Status, c.Detail)
		}
	}

	if want := min(failed, 1); code != want || len(report.Checks) < 8 {
		t.Errorf("doctor: exit code %d with %d failures among %d checks", code, failed, len(report.Checks))
	}
}

// Exit codes: 1 if a person has to fix something before the next start, 75 if a later attempt may succeed.
func TestExitCodes(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	bad := filepath.Join(dir, "bad.yaml")
	if err := os.WriteFile(bad, []byte("watch: [shop.outbox]\nmongodb: {uri: \"mongodb://u:secret@localhost/?replicaSet=r\"}\nkafka: {brokers: [a:1], requests_per_brokr: 2}\nlease: {ttl: 1s, renew: 5s}\n"), 0o600); err != nil {
		t.Fatal(err)
	}

	for _, c := range []struct {
		name string
		args []string
		code int
		says []string
	}{
		{"every problem at once", []string{"validate", "--config", bad}, 1, []string{"kafka.requests_per_brokr", "requests_per_broker", "lease"}},
		{"a wrong file", []string{"run", "--config", bad}, 1, []string{"kafka.requests_per_brokr"}},
		{"no file", []string{"run", "--config", filepath.Join(dir, "none.yaml")}, 1, []string{"none.yaml"}},
		{"an unknown command", []string{"fly"}, 1, []string{"fly"}},
		{"an unknown flag", []string{"run", "--fly"}, 1, []string{"--fly"}},
		{"a version", []string{"version"}, 0, nil},
	} {
		code, out, errOut := kit.RunCommand(t, nil, c.args...)
		if code != c.code {
			t.Errorf("%s: exit code %d, want %d\n%s", c.name, code, c.code, errOut)
		}
		for _, want := range c.says {
			// The problems are the result of validate, and messages of the other commands.
			if !strings.Contains(out+errOut, want) {
				t.Errorf("%s: no %q in %q", c.name, want, errOut)
			}
		}
		if strings.Contains(out+errOut, "secret") {
			t.Errorf("%s: the password is printed", c.name)
		}
	}

	env := []string{"OUTRELAY_MONGODB_URI=mongodb://127.0.0.1:1/?replicaSet=none&serverSelectionTimeoutMS=500", "OUTRELAY_KAFKA_BROKERS=127.0.0.1:1"}
	if code, _, errOut := kit.RunCommand(t, env, "status"); code != 75 {
		t.Errorf("status without MongoDB: exit code %d, want 75\n%s", code, errOut)
	}
	if code, _, errOut := kit.RunCommand(t, env, "validate"); code != 0 {
		t.Errorf("validate without servers: exit code %d, want 0\n%s", code, errOut)
	}
}

// A second relay at an occupied address cannot serve its health. It ends with an error, so that no relay runs
// without health checks.
func TestListenAddressInUse(t *testing.T) {
	t.Parallel()
	s := kit.New(t, kit.Options{})
	p := s.StartRelay()
	p.WaitTookOver()
	file := s.WriteConfig("other", strings.TrimPrefix(p.HTTP, "http://"))
	code, _, errOut := kit.RunCommand(t, nil, "run", "--config", file)
	if code == 0 || !strings.Contains(errOut, "http.listen") {
		t.Errorf("exit code %d, want an error that names http.listen\n%s", code, errOut)
	}
}
