package telemetry_test

import (
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
	"go.uber.org/goleak"

	"github.com/outrelay/outrelay/pkg/telemetry"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func pageOf(p *telemetry.Prometheus) string {
	page := httptest.NewRecorder()
	p.ServeHTTP(page, httptest.NewRequest(http.MethodGet, "/metrics", http.NoBody))
	return page.Body.String()
}

// readPage returns the values of all series by name and label values. The value of a histogram is its count.
func readPage(t *testing.T, p *telemetry.Prometheus) map[string]float64 {
	t.Helper()
	parser := expfmt.NewTextParser(model.UTF8Validation)
	families, err := parser.TextToMetricFamilies(strings.NewReader(pageOf(p)))
	if err != nil {
		t.Fatal(err)
	}

	out := map[string]float64{}
	for _, f := range families {
		for _, m := range f.GetMetric() {
			name := f.GetName()[len("outrelay_"):]
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

// everything measures each metric.
func everything(s telemetry.Sink) {
	for _, m := range []telemetry.Measurement{
		{Metric: telemetry.Handled, N: 3, Took: 4 * time.Millisecond, Handler: "pay"},
		{Metric: telemetry.Handled, N: 2, Took: time.Hour, Handler: "pay"},
		{Metric: telemetry.Duplicates, N: 1, Handler: "pay"},
		{Metric: telemetry.Unknown, N: 4},
		{Metric: telemetry.Failed, N: 1, Handler: "pay", Reason: "retry"},
		{Metric: telemetry.Discarded, N: 2},
		{Metric: telemetry.DeadLetters, N: 1, Handler: "pay", Reason: "rejected"},
		{Metric: telemetry.Waiting, N: 9, Handler: "pay"},
		{Metric: telemetry.Waiting, N: 7, Handler: "pay"},
		{Metric: telemetry.OldestWaiting, Took: time.Minute, Handler: "pay"},
		{Metric: telemetry.Lag, N: 40, Topic: "orders", Partition: 1},
		{Metric: telemetry.Oldest, Took: 90 * time.Second, Topic: "orders", Partition: 1},
		{Metric: telemetry.Held, N: 5},
		{Metric: telemetry.HeldBytes, N: 1000},
		{Metric: telemetry.Running, N: 2},
		{Metric: telemetry.Assigned, N: 2},
		{Metric: telemetry.Assigned, N: 1},
		{Metric: telemetry.Committed, N: 1, Reason: "ok"},
		{Metric: telemetry.Committed, N: 1, Reason: "failed"},
		{Metric: telemetry.Suspended, N: 1, Reason: "database"},
	} {
		m.Group = "billing"
		s.Measure(m)
	}

	s.Measure(telemetry.Measurement{Metric: telemetry.Appended, N: 3})
}

// wantEverything are the values after everything, with the labels in the order of their names.
var wantEverything = map[string]float64{
	"consumer_handled_total billing pay":                  5,
	"consumer_handle_seconds billing pay":                 2,
	"consumer_duplicates_total billing pay":               1,
	"consumer_unknown_total billing":                      4,
	"consumer_failures_total billing pay retry":           1,
	"consumer_dropped_total billing ":                     2,
	"consumer_dead_letters_total billing pay rejected":    1,
	"consumer_waiting_messages billing pay":               7,
	"consumer_oldest_waiting_seconds billing pay":         60,
	"consumer_lag_messages billing orders 1":              40,
	"consumer_oldest_unfinished_seconds billing orders 1": 90,
	"consumer_held_messages billing":                      5,
	"consumer_held_bytes billing":                         1000,
	"consumer_running_lanes billing":                      2,
	"consumer_assigned_partitions billing":                1,
	"consumer_generations_total billing":                  2,
	"consumer_commits_total billing ok":                   1,
	"consumer_commits_total billing failed":               1,
	"consumer_suspended billing  database":                1,
	"outbox_appended_total":                               3,
}

func TestPrometheusServesEveryMetric(t *testing.T) {
	t.Parallel()
	p := telemetry.NewPrometheus()
	if got := readPage(t, p); len(got) != 0 {
		t.Errorf("before any measurement: %v", got)
	}
	everything(p)
	if diff := cmp.Diff(wantEverything, readPage(t, p)); diff != "" {
		t.Errorf("metrics (-want +got):\n%s", diff)
	}
}

func TestHistogramsAddUp(t *testing.T) {
	t.Parallel()
	p := telemetry.NewPrometheus()
	for _, took := range []time.Duration{0, time.Millisecond, 1001 * time.Microsecond, time.Minute} {
		p.Measure(telemetry.Measurement{Metric: telemetry.Handled, N: 1, Took: took, Group: "g", Handler: `a "b"\c`})
	}

	want := `# HELP outrelay_consumer_handled_total Messages that were handled.
# TYPE outrelay_consumer_handled_total counter
outrelay_consumer_handled_total{group="g",handler="a \"b\"\\c"} 4
# HELP outrelay_consumer_handle_seconds Time of one successful attempt with its commit.
# TYPE outrelay_consumer_handle_seconds histogram
`

	for _, bucket := range []string{
		"0.0005 1", "0.001 2", "0.002 3", "0.003 3", "0.005 3", "0.01 3", "0.02 3", "0.05 3",
		"0.1 3", "0.2 3", "0.5 3", "1 3", "2 3", "5 3", "10 3", "+Inf 4",
	} {
		bound, n, _ := strings.Cut(bucket, " ")
		want += `outrelay_consumer_handle_seconds_bucket{group="g",handler="a \"b\"\\c",le="` + bound + `"} ` + n + "\n"
	}

	want += `outrelay_consumer_handle_seconds_sum{group="g",handler="a \"b\"\\c"} 60.002001
outrelay_consumer_handle_seconds_count{group="g",handler="a \"b\"\\c"} 4
`

	if diff := cmp.Diff(want, pageOf(p)); diff != "" {
		t.Error(diff)
	}
}
