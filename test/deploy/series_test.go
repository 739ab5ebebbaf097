package deploy

import (
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
	"go.uber.org/goleak"

	"github.com/outrelay/outrelay/internal/base/metrics"
	"github.com/outrelay/outrelay/pkg/telemetry"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// family is a metric with its label names.
type family struct {
	labels    []string
	histogram bool
}

var described = regexp.MustCompile(`fqName: "([^"]+)".*constLabels: \{([^}]*)\}, variableLabels: \{([^}]*)\}`)

// collectMetrics returns all metrics of the relay and of a consumer, including metrics without series.
func collectMetrics(t *testing.T) map[string]family {
	t.Helper()
	out := collectServiceMetrics(t)
	r := metrics.New("test").Registry
	ch := make(chan *prometheus.Desc)
	go func() { r.Describe(ch); close(ch) }()
	for d := range ch {
		m := described.FindStringSubmatch(d.String())
		if m == nil {
			t.Fatalf("a description of another form: %s", d)
		}

		f := family{}
		for pair := range strings.SplitSeq(m[2], ",") {
			if name, _, ok := strings.Cut(pair, "="); ok {
				f.labels = append(f.labels, name)
			}
		}

		for name := range strings.SplitSeq(m[3], ",") {
			if name != "" {
				f.labels = append(f.labels, name)
			}
		}

		slices.Sort(f.labels)
		out[m[1]] = f
	}

	families, err := r.Gather()
	if err != nil {
		t.Fatal(err)
	}

	for _, g := range families {
		if g.GetType() == dto.MetricType_HISTOGRAM {
			f := out[g.GetName()]
			f.histogram = true
			out[g.GetName()] = f
		}
	}
	return out
}

// collectServiceMetrics returns the metrics of a service that appends and consumes.
func collectServiceMetrics(t *testing.T) map[string]family {
	t.Helper()
	p := telemetry.NewPrometheus()
	for _, m := range []telemetry.Metric{
		telemetry.Handled, telemetry.Duplicates, telemetry.Unknown, telemetry.Failed, telemetry.Discarded, telemetry.DeadLetters,
		telemetry.Waiting, telemetry.OldestWaiting, telemetry.Stray, telemetry.Lag, telemetry.Oldest, telemetry.Held, telemetry.HeldBytes,
		telemetry.Running, telemetry.Assigned, telemetry.Committed, telemetry.Suspended, telemetry.Appended,
		telemetry.Connections, telemetry.Checkout, telemetry.CheckoutFailed, telemetry.RateWaiting,
	} {
		p.Measure(telemetry.Measurement{Metric: m})
	}
	page := httptest.NewRecorder()
	p.ServeHTTP(page, httptest.NewRequest(http.MethodGet, "/metrics", http.NoBody))

	parser := expfmt.NewTextParser(model.UTF8Validation)
	families, err := parser.TextToMetricFamilies(page.Body)
	if err != nil {
		t.Fatal(err)
	}
	out := map[string]family{}
	for name, g := range families {
		f := family{histogram: g.GetType() == dto.MetricType_HISTOGRAM}
		for _, l := range g.GetMetric()[0].GetLabel() {
			f.labels = append(f.labels, l.GetName())
		}
		slices.Sort(f.labels)
		out[name] = f
	}
	return out
}

// findSeries returns the family of a name in an expression. The name of a histogram has a suffix there.
func findSeries(all map[string]family, name string) (family, bool) {
	f, ok := all[name]
	if ok {
		return f, !f.histogram
	}

	for _, suffix := range []string{"_bucket", "_sum", "_count"} {
		base, cut := strings.CutSuffix(name, suffix)
		if f, ok = all[base]; cut && ok && f.histogram {
			if suffix == "_bucket" {
				f.labels = append(slices.Clone(f.labels), "le")
			}
			return f, true
		}
	}
	return family{}, false
}

func repoPath(t *testing.T, parts ...string) string {
	t.Helper()
	path := filepath.Join(append([]string{"..", ".."}, parts...)...)
	if _, err := os.Stat(path); err != nil {
		t.Fatal(err)
	}
	return path
}

func readRepoFile(t *testing.T, parts ...string) []byte {
	t.Helper()
	b, err := os.ReadFile(repoPath(t, parts...))
	if err != nil {
		t.Fatal(err)
	}
	return b
}
