package opspage

import (
	"context"
	"slices"
	"strings"
	"testing"

	"github.com/outrelay/outrelay/internal/operate/admin"
	"github.com/outrelay/outrelay/internal/relay/problems"
)

// The verdict of a watcher counts only its own problems and those of the whole deployment.
func TestEachWatcherHasItsVerdict(t *testing.T) {
	t.Parallel()
	o := admin.Overview{
		Slots: []admin.SlotStatus{{Name: "orders", Slot: "0of1", State: "live"}, {Name: "tried", Slot: "0of1"}},
		Problems: []admin.Problem{
			{Watcher: "tried", Severity: problems.Fail, Detail: "no process runs it"},
			{Severity: problems.Warn, Object: "nodes"},
		},
	}

	v := newOverview(o, "orders")
	if v.Worst != "warn" || len(v.Problems) != 1 || v.Problems[0].Object != "nodes" {
		t.Errorf("orders: worst %s, problems %+v", v.Worst, v.Problems)
	}
	if want := []verdict{{"orders", "ok"}, {"tried", "fail"}}; !slices.Equal(v.Watching, want) {
		t.Errorf("watchers: got %+v, want %+v", v.Watching, want)
	}
	if v := newOverview(o, "tried"); v.Worst != "fail" || len(v.Problems) != 2 || v.Problems[0].Detail != "no process runs it" {
		t.Errorf("tried: worst %s, problems %+v", v.Worst, v.Problems)
	}
}

// waitingDesk is a desk with a parked topic.
type waitingDesk struct{ *desk }

func (d waitingDesk) Overview(context.Context) (admin.Overview, error) {
	return admin.Overview{
		Slots: []admin.SlotStatus{{Name: "orders", Slot: "0of1", State: "live", LagS: 0.25}}, LagS: 0.25, OldestS: 180, Counts: admin.Counts{Parked: 3},
	}, nil
}

// The lag is the same number in the line of figures, the headline, the chart and the card. The age of a parked envelope has another name.
func TestLagHasOneMeaning(t *testing.T) {
	t.Parallel()
	d := waitingDesk{&desk{}}
	site := New(Options{Watcher: "orders", UseCases: func(admin.Actor, string, string) UseCases {
		u := d.useCases()
		u.Operator = d
		return u
	}})
	for path, lags := range map[string]int{"/strip": 1, "/": 3} {
		_, body := sendRequest(t, site, &operator, "GET", path, nil)
		text := strings.Join(strings.Fields(body), " ")
		if !strings.Contains(text, "lag 0.25 s ·") || strings.Count(text, "0.25") != lags || strings.Contains(text, "lag 180") || !strings.Contains(text, "oldest waiting 180 s") && !strings.Contains(text, "oldest waiting 3 min") {
			t.Errorf("%s: %s", path, text)
		}
	}
}
