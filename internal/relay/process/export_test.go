package process

import (
	"slices"
	"testing"
	"time"

	dto "github.com/prometheus/client_model/go"

	"github.com/outrelay/outrelay/internal/relay/internal/term"
	"github.com/outrelay/outrelay/internal/relay/problems"
)

// Hasten makes the relay's calls time out after call, and shortens its intervals of several seconds
// to half a second. It must be called before Run.
func (r *Relay) Hasten(call time.Duration) {
	const soon = 500 * time.Millisecond
	r.shared.Pace = term.Pace{Call: call, Clean: soon, Indexes: soon, Standstill: soon, Stuck: soon}
}

// FailPart reports err as a problem of a part of the slots that only a person can fix.
func (r *Relay) FailPart(part string, err error) {
	for _, one := range r.slots {
		one.State.ReportFatalProblem(part, err)
	}
}

// Counts reports whether this process counts the documents of the watcher.
func (r *Relay) Counts() bool { return r.counts.countedAt.Load() > 0 }

// ProblemSeconds returns the metric of a problem of a kind, or 0 if there is none.
func (r *Relay) ProblemSeconds(t *testing.T, kind problems.Kind) float64 {
	t.Helper()
	return r.Gauge(t, "outrelay_problem_seconds", string(kind))
}

// HasSeries reports whether there is a metric of the name.
func (r *Relay) HasSeries(t *testing.T, name string) bool {
	t.Helper()
	families, err := r.metrics.Registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	return slices.ContainsFunc(families, func(family *dto.MetricFamily) bool { return family.GetName() == name })
}

// Gauge returns the value of a gauge whose first label is label, or 0 if there is none.
func (r *Relay) Gauge(t *testing.T, name, label string) float64 {
	t.Helper()
	families, err := r.metrics.Registry.Gather()
	if err != nil {
		t.Fatal(err)
	}

	for _, f := range families {
		for _, m := range f.GetMetric() {
			if f.GetName() == name && m.GetLabel()[0].GetValue() == label {
				return m.GetGauge().GetValue()
			}
		}
	}
	return 0
}
