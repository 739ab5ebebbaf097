//go:build unix

package kit

import (
	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
)

// RunCrashing starts a command that kills itself at a crash point, and returns at once.
func (s *Scene) RunCrashing(crashPoint string, args ...string) *Process {
	s.tb.Helper()
	args = append(args, "--config", s.WriteConfig("operator", "off"))
	return Launch(s.tb, "operator", Binary(s.tb), []string{"OUTRELAY_CRASH_AT=" + crashPoint}, args...)
}

// ReadSlots returns the node that runs each slot, or "" for a slot without a working owner.
func (s *Scene) ReadSlots() map[string]string {
	s.tb.Helper()
	var all struct {
		Slots []struct{ Slot, Owner, Node, State string }
	}
	s.readStatusJSON(&all)

	nodes := map[string]string{}
	for _, w := range all.Slots {
		nodes[w.Slot] = ""
		if w.Owner != "" && w.State != "no-owner" && w.State != "paused" {
			nodes[w.Slot] = w.Node
		}
	}
	return nodes
}

// WaitShared waits until each process runs this number of slots, and no other process runs one.
func (s *Scene) WaitShared(want map[*Process]int) {
	s.tb.Helper()
	stacktest.Eventually(s.tb, "the slots are distributed as wanted", func() bool {
		// The documents first, because reading them starts no process.
		return s.ownersMatch(want) && s.statusMatches(want)
	})
}

// ownersMatch reports whether enough watcher documents have each process as their owner.
func (s *Scene) ownersMatch(want map[*Process]int) bool {
	s.tb.Helper()
	cur, err := s.State.Collection("watchers").Find(s.tb.Context(), bson.D{{Key: "owner", Value: bson.D{{Key: "$ne", Value: nil}}}})
	var docs []struct{ Node string }
	if err == nil {
		err = cur.All(s.tb.Context(), &docs)
	}
	if err != nil {
		s.tb.Fatal(err)
	}

	owned := map[string]int{}
	for _, d := range docs {
		owned[d.Node]++
	}

	for p, n := range want {
		if owned[p.Node] < n {
			return false
		}
	}
	return true
}

// statusMatches reports whether `outrelay status` shows this distribution.
func (s *Scene) statusMatches(want map[*Process]int) bool {
	s.tb.Helper()
	slots, got, n := s.ReadSlots(), map[string]int{}, 0
	for _, node := range slots {
		got[node]++
	}
	for p, k := range want {
		if got[p.Node] != k {
			return false
		}
		n += k
	}
	return got[""] == 0 && n == len(slots)
}
