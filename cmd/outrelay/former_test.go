package main

import (
	"strings"
	"testing"
)

// A command or a flag of a former name is rejected with its successor.
func TestAFormerCommandNamesItsSuccessor(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ line, want string }{
		{"events", "unknown command \"events\" of outrelay; `outrelay audit` replaces it"},
		{"migrate", "unknown command \"migrate\" of outrelay; `outrelay setup` replaces it"},
		{"help migrate", "unknown command \"migrate\" of outrelay; `outrelay setup` replaces it"},
		{"recover --adopt", "unknown flag --adopt; --accept-copy replaces it"},
		{"dead requeue --state replayable", "unknown flag --state; --requeued replaces it"},
		{"waiting list --state parked", "unknown flag --state; --reason replaces it"},
		{"status --state x", "unknown flag --state; run `outrelay status --help` for the flags"},
	} {
		code, _, errOut := runCommand(t, minimalEnv, strings.Fields(c.line)...)

		if code != exitConfig || errOut != "outrelay: "+c.want+"\n" {
			t.Errorf("outrelay %s: exit code %d, stderr %q, want %q", c.line, code, errOut, c.want)
		}
	}
}
