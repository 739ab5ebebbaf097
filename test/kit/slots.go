//go:build unix

package kit

import "encoding/json"

// RunCrashing executes one command that kills itself at a crash point; it does not wait.
func (s *Scene) RunCrashing(at string, args ...string) *Process {
	s.tb.Helper()
	return launch(s.tb, "operator", Binary(s.tb, "crashpoints"), []string{"OUTRELAY_CRASH_AT=" + at}, append(args, "--config", s.ConfigFile("operator", "off"))...)
}

// Slots tells by slot which node runs it, "" for none that works.
func (s *Scene) Slots() map[string]string {
	s.tb.Helper()
	code, out, errOut := s.Run("status", "--json")
	if code != 0 {
		s.tb.Fatalf("status: exit code %d\n%s", code, errOut)
	}
	var all struct {
		Watchers []struct{ Slot, Owner, Node, State string }
	}
	if err := json.Unmarshal([]byte(out), &all); err != nil {
		s.tb.Fatalf("status --json: %v\n%s", err, out)
	}
	nodes := map[string]string{}
	for _, w := range all.Watchers {
		nodes[w.Slot] = ""
		if w.Owner != "" && w.State != "no-owner" && w.State != "paused" {
			nodes[w.Slot] = w.Node
		}
	}
	return nodes
}
