package consumermetrics

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// gatherValues returns the values of all series by name and label values. The value of a histogram is its count.
func gatherValues(t *testing.T, r *prometheus.Registry) map[string]float64 {
	t.Helper()
	families, err := r.Gather()
	if err != nil {
		t.Fatal(err)
	}

	out := map[string]float64{}
	for _, f := range families {
		for _, m := range f.GetMetric() {
			name := f.GetName()[len("outrelay_consumer_"):]
			for _, l := range m.GetLabel() {
				name += " " + l.GetValue()
			}
			switch {
			case m.GetCounter() != nil:
				out[name] = m.GetCounter().GetValue()
			case m.GetGauge() != nil:
				out[name] = m.GetGauge().GetValue()
			default:
				out[name] = float64(m.GetHistogram().GetSampleCount())
			}
		}
	}
	return out
}

func TestEverythingIsCounted(t *testing.T) {
	t.Parallel()
	r := prometheus.NewRegistry()
	o, err := New(r, "billing")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := New(r, "billing"); err == nil {
		t.Error("New with the same group and registry: got no error, want one")
	}
	if _, err := New(r, "shipping"); err != nil {
		t.Errorf("New with another group: %v", err)
	}

	o.Assigned(2)
	o.Handled("pay", 3, 4*time.Millisecond)
	o.Duplicates("pay", 1)
	o.Dropped("", 2)
	o.Failed("pay", "discard")
	o.Lag("orders", 1, 40)
	o.Oldest("orders", 1, 90*time.Second)
	o.Held(5, 1000)
	o.Running(2)
	o.Committed(nil)
	o.Committed(errors.New("x"))
	o.Suspended("database", true)

	got := gatherValues(t, r)
	for key := range got {
		if len(key) > 8 && key[len(key)-8:] == "shipping" {
			delete(got, key)
		}
	}
	want := map[string]float64{
		"handled_total billing pay": 3, "handle_seconds billing pay": 1, "duplicates_total billing pay": 1, "dropped_total billing ": 2,
		fmt.Sprintf("failures_total %s billing pay", "discard"): 1, "lag_messages billing 1 orders": 40,
		"oldest_unfinished_seconds billing 1 orders": 90, "held_messages billing": 5,
		"held_bytes billing": 1000, "running_lanes billing": 2, "assigned_partitions billing": 2, "generations_total billing": 1,
		"commits_total billing ok": 1, "commits_total billing failed": 1, "suspended billing database": 1,
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("metrics (-want +got):\n%s", diff)
	}

	o.Suspended("database", false)
	o.Assigned(1)
	got = gatherValues(t, r)
	_, old := got["oldest_unfinished_seconds billing 1 orders"]
	if _, stays := got["lag_messages billing 1 orders"]; stays || old || got["suspended billing database"] != 0 {
		t.Errorf("after a rebalance: %v", got)
	}
}
