package opspage

import (
	"slices"
	"testing"

	"github.com/outrelay/outrelay/internal/admin"
)

// The verdict of a watcher counts only its own checks and those of the whole deployment.
func TestEachWatcherHasItsVerdict(t *testing.T) {
	t.Parallel()
	o := admin.Overview{
		Watchers: []admin.Watcher{{Name: "orders", Slot: "0of1", State: "live"}, {Name: "tried", Slot: "0of1"}},
		Checks: []admin.Check{
			{ID: "slot orders/0of1", Watcher: "orders", Status: admin.CheckOK},
			{ID: "slot tried/0of1", Watcher: "tried", Status: admin.CheckFail, Detail: "no process runs it"},
			{ID: "nodes", Status: admin.CheckWarn, Detail: "one node and no standby"},
		},
	}

	v := newOverview(o, "orders")
	if v.Worst != admin.CheckWarn || len(v.Problems) != 1 || v.Problems[0].ID != "nodes" || len(v.Checks) != 2 {
		t.Errorf("orders: worst %s, problems %+v, checks %+v", v.Worst, v.Problems, v.Checks)
	}
	if want := []verdict{{"orders", admin.CheckOK}, {"tried", admin.CheckFail}}; !slices.Equal(v.Watching, want) {
		t.Errorf("watchers: got %+v, want %+v", v.Watching, want)
	}
	if v := newOverview(o, "tried"); v.Worst != admin.CheckFail || len(v.Problems) != 2 || v.Problems[0].Detail != "no process runs it" {
		t.Errorf("tried: worst %s, problems %+v", v.Worst, v.Problems)
	}
	if name := titleOfCheck(v.Problems[0]); name != "Nodes" {
		t.Errorf("the name of the check: %s", name)
	}
}
