//go:build unix

package devstack_test

import (
	"slices"
	"testing"
	"time"

	"github.com/outrelay/outrelay/internal/lab/devstack"
	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
)

// A program that runs next to the servers gets its environment, writes its output to a log, and ends with the
// stack.
func TestPrograms(t *testing.T) {
	t.Setenv(devstack.EnvMongoDB, stacktest.MongoURI(t))
	s, err := devstack.Start(t.Context(), devstack.Options{Mongods: 1, Env: true})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Stop()
	run := func(name string, args ...string) *devstack.Program {
		t.Helper()
		p, err := s.Run(name, []string{"WORD=hello"}, "/bin/sh", args...)
		if err != nil {
			t.Fatal(err)
		}
		return p
	}

	ended := func(p *devstack.Program) {
		t.Helper()
		select {
		case <-p.Done():
		case <-time.After(patience):
			t.Fatalf("%s does not end", p.Name())
		}
	}

	output := run("said", "-c", "echo one; echo two; echo $WORD; exit 3")
	ended(output)
	if err := output.Err(); err == nil || err.Error() != "exit status 3" || output.Running() {
		t.Errorf("ended with %v", err)
	}
	if lines := output.LastLines(2); !slices.Equal(lines, []string{"two", "hello"}) {
		t.Errorf("last lines %q", lines)
	}
	if output.Kill() != nil || output.Terminate() != nil {
		t.Error("ending an ended program is an error")
	}

	terminated, killed, left := run("asked", "-c", "exec sleep 600"), run("killed", "-c", "exec sleep 600"), run("left", "-c", "exec sleep 600")
	if err := terminated.Terminate(); err != nil {
		t.Error(err)
	}

	ended(terminated)
	if err := killed.Pause(); err != nil {
		t.Error(err)
	}
	if !killed.Running() || killed.Kill() != nil || killed.Running() || len(killed.LastLines(5)) != 0 {
		t.Error("a paused program is not killed")
	}
	if _, err := s.Run("left", nil, "/bin/sh"); err == nil {
		t.Error("two programs of one name")
	}

	absent, err := s.Run("absent", nil, "/no/such/program")
	if err != nil {
		t.Fatal(err)
	}

	ended(absent)
	if absent.Err() == nil || len(absent.LastLines(1)) == 0 {
		t.Error("a program that is not there leaves no word")
	}

	s.Stop()
	ended(left)
}
