//go:build unix

package bench

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/test/kit"
)

// TestRelaysEndWithTheBenchmark: after kill -9 of the benchmark, the relay of another program does not go on.
func TestRelaysEndWithTheBenchmark(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	program, started := filepath.Join(dir, "relay"), filepath.Join(dir, "pid")
	// A relay that writes a line of its log notices that its reader has ended. This one writes none.
	script := fmt.Sprintf("#!/bin/sh\necho $$ >%[1]s.new && mv %[1]s.new %[1]s\nexec %[2]s \"$@\" 2>/dev/null\n", started, kit.Binary(t))
	if err := os.WriteFile(program, []byte(script), 0o755); err != nil {
		t.Fatal(err)
	}

	p := kit.Launch(t, "bench", kit.Binary(t), nil, "bench", "--mongodb", stacktest.MongoURI(t), "--kafka", strings.Join(stacktest.Brokers(t), ","),
		"--relay", program, "--reconciler", "--events", "100", "--runs", "1", "--only", "drain")
	var pid int
	stacktest.EventuallyIn(t, kit.Patience, "the benchmark starts a relay", func() bool {
		text, err := os.ReadFile(started)
		if err != nil {
			return false
		}
		pid, err = strconv.Atoi(strings.TrimSpace(string(text)))
		return err == nil
	})

	p.Kill()
	stacktest.EventuallyIn(t, kit.Patience, fmt.Sprintf("process %d ends", pid), func() bool { return kit.IsGone(pid) })
}
