package process

import (
	"testing"
	"time"

	"github.com/outrelay/outrelay/internal/relay/internal/term"
	"github.com/outrelay/outrelay/internal/relay/problems"
)

// Hasten makes the relay's calls time out after call, and shortens its intervals of several seconds
// to half a second. It must be called before Run.
func (r *Relay) Hasten(call time.Duration) {
	const soon = 500 * time.Millisecond
	r.shared.Pace = term.Pace{Call: call, Clean: soon, Indexes: soon, Standstill: soon, Stuck: soon}
}

// ProblemSeconds returns the metric of a problem of a kind, or 0 if there is none.
func (r *Relay) ProblemSeconds(t *testing.T, kind problems.Kind) float64 {
	t.Helper()
	families, err := r.metrics.Registry.Gather()
	if err != nil {
		t.Fatal(err)
	}

	for _, f := range families {
		for _, m := range f.GetMetric() {
			if f.GetName() == "outrelay_problem_seconds" && m.GetLabel()[0].GetValue() == string(kind) {
				return m.GetGauge().GetValue()
			}
		}
	}
	return 0
}
