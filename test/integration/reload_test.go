//go:build unix

package integration

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/test/kit"
)

// SIGHUP makes a relay reload its file. A new log level applies at once. Another changed key is logged and
// applies at the next start; for the login to MongoDB, the log states what that means. An invalid file changes nothing. All three are counted and are in the audit log,
// and the relay continues to deliver.
func TestSIGHUPReadsTheConfigurationAgain(t *testing.T) {
	t.Parallel()
	s := kit.New(t, kit.Options{})
	topics := s.ReadTopics()
	p := s.StartRelay()
	p.WaitTookOver()
	file := p.ConfigFile
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}

	write := func(level, more string) {
		t.Helper()
		next := filepath.Join(t.TempDir(), "next.yaml")
		changed := strings.Replace(string(text), "level: debug", "level: "+level, 1)
		if more != "" {
			changed = strings.Replace(changed, "mongodb://", "mongodb://relay:rotated@", 1)
		}
		if err := os.WriteFile(next, []byte(changed+more), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(next, file); err != nil {
			t.Fatal(err)
		}
		p.Reload()
	}

	if !strings.Contains(string(text), "level: debug") || strings.Contains(string(text), "invalidate:") {
		t.Fatalf("the scene's configuration is another one:\n%s", text)
	}

	write("error", "")
	// At this level nothing is logged, but the reload is counted.
	counted := func(want string) {
		t.Helper()
		stacktest.Eventually(t, want, func() bool {
			_, body := p.Get("/metrics")
			return strings.Contains(body, `outrelay_config_reloads_total{`+want+"\n")
		})
	}

	counted(`result="applied",what="settings"} 1`)
	write("info", "invalidate: halt\n")
	line := p.WaitForLog("some changes apply only after the next start")
	if !strings.Contains(line, "log.level=info") || !strings.Contains(line, "invalidate") || strings.Contains(line, "halt") ||
		!strings.Contains(line, "mongodb.uri") || strings.Contains(line, "rotated") || !strings.Contains(line, "a changed login to MongoDB fails for each new connection") {
		t.Errorf("log line %s", line)
	}

	write("loud", "")
	if line := p.WaitForLog("the relay continues with the old one"); !strings.Contains(line, "log.level") {
		t.Errorf("log line %s", line)
	}

	counted(`result="rejected",what="settings"} 1`)
	counted(`result="applied",what="settings"} 2`)
	s.StartLoad(kit.Load{Events: 20}).WaitDone()
	s.CheckDelivery(topics)
	stacktest.Eventually(t, "three entries", func() bool {
		_, out, _ := s.RunCommand("audit", "--json", "--kind", "config_reloaded,config_rejected")
		return strings.Count(out, `"config_reloaded"`) == 2 && strings.Count(out, `"config_rejected"`) == 1
	})

	p.Terminate()
	if code := p.WaitExit(); code != 0 {
		t.Errorf("exit code %d, want 0", code)
	}
}
