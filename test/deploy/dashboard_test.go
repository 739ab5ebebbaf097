package deploy

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"

	"github.com/outrelay/outrelay/internal/relay/problems"
	"github.com/outrelay/outrelay/internal/relay/stored/state"
)

type dashboard struct {
	UID        string `json:"uid"`
	Templating struct {
		List []struct {
			Name       string `json:"name"`
			Type       string `json:"type"`
			Definition string `json:"definition"`
		} `json:"list"`
	} `json:"templating"`
	Annotations struct {
		List []struct {
			Expr string `json:"expr"`
		} `json:"list"`
	} `json:"annotations"`
	Panels []struct {
		ID          int                      `json:"id"`
		Type        string                   `json:"type"`
		Title       string                   `json:"title"`
		Description string                   `json:"description"`
		GridPos     struct{ H, W, X, Y int } `json:"gridPos"`
		Targets     []struct {
			Expr         string `json:"expr"`
			LegendFormat string `json:"legendFormat"`
			Exemplar     bool   `json:"exemplar"`
		} `json:"targets"`
	} `json:"panels"`
}

func readDashboard(t *testing.T) dashboard {
	t.Helper()
	var d dashboard
	if err := json.Unmarshal(readRepoFile(t, "deploy", "grafana", "outrelay.json"), &d); err != nil {
		t.Fatal(err)
	}
	return d
}

var legendLabel = regexp.MustCompile(`\{\{(\w+)\}\}`)

func TestDashboardAgainstTheRealMetrics(t *testing.T) {
	t.Parallel()
	all, d := collectMetrics(t), readDashboard(t)
	rows, ids, cells := []string{}, map[int]bool{}, map[[2]int]string{}
	exemplars := false
	for _, p := range d.Panels {
		if ids[p.ID] || p.Title == "" {
			t.Errorf("panel %d %q has a duplicate id or no title", p.ID, p.Title)
		}

		ids[p.ID] = true
		for x := p.GridPos.X; x < p.GridPos.X+p.GridPos.W; x++ {
			for y := p.GridPos.Y; y < p.GridPos.Y+p.GridPos.H; y++ {
				if other := cells[[2]int{x, y}]; other != "" || x >= 24 {
					t.Errorf("panel %q overlaps %q or exceeds the grid", p.Title, other)
				}
				cells[[2]int{x, y}] = p.Title
			}
		}

		if p.Type == "row" {
			rows = append(rows, p.Title)
			continue
		}
		if p.Description == "" || len(p.Targets) == 0 {
			t.Errorf("panel %q has no description or no query", p.Title)
		}

		for _, target := range p.Targets {
			exemplars = exemplars || target.Exemplar && strings.Contains(target.Expr, "outrelay_publish_latency_seconds_bucket")
			q, err := parseExpression(all, target.Expr)
			if err != nil {
				t.Errorf("panel %q: %s: %v", p.Title, target.Expr, err)
			}
			for _, m := range legendLabel.FindAllStringSubmatch(target.LegendFormat, -1) {
				aggregated := strings.Contains(target.Expr, " by (") || strings.Contains(target.Expr, "sum(")
				if !slices.Contains(q.labels, m[1]) && (aggregated || !slices.Contains(q.known, m[1]) && !slices.Contains(targets, m[1])) {
					t.Errorf("panel %q: the legend uses the label %s, which %s drops", p.Title, m[1], target.Expr)
				}
			}
		}
	}

	want := splitWords("Overview Flow Ownership Waiting Reconcile Purge Kafka Consumer Process")
	if !slices.Equal(rows, want) {
		t.Errorf("rows %v, want %v", rows, want)
	}
	if !exemplars {
		t.Error("no panel shows exemplars of the latency")
	}

	for _, v := range d.Templating.List {
		if v.Type == "query" {
			name, label, ok := strings.Cut(strings.TrimSuffix(strings.TrimPrefix(v.Definition, "label_values("), ")"), ", ")
			if f, there := findSeries(all, name); !ok || !there || !slices.Contains(f.labels, label) && !slices.Contains(targets, label) {
				t.Errorf("variable %s: %s", v.Name, v.Definition)
			}
		}
	}

	for _, a := range d.Annotations.List {
		if _, err := parseExpression(all, a.Expr); err != nil {
			t.Errorf("annotation: %s: %v", a.Expr, err)
		}
	}
}

// rules is a Prometheus rule file.
type rules struct {
	Groups []struct {
		Name  string `yaml:"name"`
		Rules []struct {
			Alert       string            `yaml:"alert"`
			Expr        string            `yaml:"expr"`
			For         string            `yaml:"for"`
			Labels      map[string]string `yaml:"labels"`
			Annotations map[string]string `yaml:"annotations"`
		} `yaml:"rules"`
	} `yaml:"groups"`
}

func readRules(t *testing.T) rules {
	t.Helper()
	var r rules
	d := yaml.NewDecoder(bytes.NewReader(readRepoFile(t, "deploy", "prometheus", "alerts.yaml")))
	d.KnownFields(true)
	if err := d.Decode(&r); err != nil {
		t.Fatal(err)
	}
	return r
}

var (
	alertName  = regexp.MustCompile(`^Outrelay[A-Z][A-Za-z]+$`)
	alertFor   = regexp.MustCompile(`^[0-9]+m$`)
	alertLabel = regexp.MustCompile(`\$labels\.(\w+)`)
)

func TestAlertsAgainstTheRealMetrics(t *testing.T) {
	t.Parallel()
	all, doc := collectMetrics(t), string(readRepoFile(t, "docs", "metrics.md"))
	about := map[string][]string{} // metric → alerts
	seen := map[string]bool{}
	for _, g := range readRules(t).Groups {
		for _, a := range g.Rules {
			if !alertName.MatchString(a.Alert) || seen[a.Alert] || !alertFor.MatchString(a.For) {
				t.Errorf("alert %q for %q: duplicate or invalid name, or invalid time", a.Alert, a.For)
			}

			seen[a.Alert] = true
			q, err := parseExpression(all, a.Expr)
			if err != nil {
				t.Errorf("%s: %s: %v", a.Alert, a.Expr, err)
			}

			for _, m := range q.metrics {
				about[m] = append(about[m], a.Alert)
			}

			if !slices.Contains(splitWords("critical warning info"), a.Labels["severity"]) || a.Annotations["summary"] == "" || a.Annotations["description"] == "" {
				t.Errorf("%s has no severity, summary or description", a.Alert)
			}

			for _, m := range alertLabel.FindAllStringSubmatch(a.Annotations["summary"]+a.Annotations["description"], -1) {
				if !slices.Contains(q.labels, m[1]) {
					t.Errorf("%s uses the label %s, which its expression drops", a.Alert, m[1])
				}
			}

			if want := "/docs/metrics.md#" + strings.ToLower(a.Alert); !strings.HasSuffix(a.Annotations["runbook_url"], want) || !strings.Contains(doc, "\n### "+a.Alert+"\n") {
				t.Errorf("%s has no section in docs/metrics.md, or a wrong runbook_url", a.Alert)
			}
		}
	}

	for _, name := range splitWords("outrelay_problem_seconds outrelay_lease_owner outrelay_ready outrelay_checkpoint_age_seconds outrelay_handler_dead_letters outrelay_consumer_assigned_partitions") {
		if len(about[name]) == 0 {
			t.Errorf("no alert uses %s", name)
		}
	}
}

// Each kind of problem has an alert for each severity that it may have, with the texts of the list.
func TestAlertsHaveTheKindsOfProblems(t *testing.T) {
	t.Parallel()
	type severity struct {
		kind     problems.Kind
		severity problems.Severity
	}
	labels := map[problems.Severity]string{problems.Warn: "warning", problems.Fail: "critical"}
	selector := regexp.MustCompile(`outrelay_problem_seconds\{kind="(\w+)", severity="(\w+)"\}`)
	found := map[severity]bool{}
	for _, g := range readRules(t).Groups {
		for _, a := range g.Rules {
			m := selector.FindStringSubmatch(a.Expr)
			if m == nil {
				continue
			}
			one := severity{problems.Kind(m[1]), problems.Severity(m[2])}
			spec := problems.SpecOf(one.kind)
			// The fix may begin with a command, which must stay as one types it.
			text := strings.ToUpper(spec.Consequence[:1]) + spec.Consequence[1:] + ". outrelay problems list names the cause. Fix: " + spec.Fix + "."
			if found[one] || a.Labels["severity"] != labels[one.severity] || a.Annotations["description"] != text {
				t.Errorf("%s: want one alert for %v with the severity %s and the text %q", a.Alert, one, labels[one.severity], text)
			}
			found[one] = true
		}
	}

	n := 0
	for _, spec := range problems.Specs() {
		for _, s := range spec.Severities {
			n++
			if !found[severity{spec.Kind, s}] {
				t.Errorf("no alert for %s, %s", spec.Kind, s)
			}
		}
	}
	if n != len(found) {
		t.Errorf("%d alerts, want %d: one has a severity that its kind never has", len(found), n)
	}
}

// TestEveryMetricIsShownAndExplained checks that each outrelay metric is in the dashboard or an alert
// and has a row in docs/metrics.md, and that docs/metrics.md names no other metrics.
func TestEveryMetricIsShownAndExplained(t *testing.T) {
	t.Parallel()
	all, doc := collectMetrics(t), string(readRepoFile(t, "docs", "metrics.md"))
	var shown strings.Builder
	for _, p := range readDashboard(t).Panels {
		for _, q := range p.Targets {
			fmt.Fprintln(&shown, q.Expr)
		}
	}

	for _, g := range readRules(t).Groups {
		for _, a := range g.Rules {
			fmt.Fprintln(&shown, a.Expr)
		}
	}

	unshown := splitWords("outrelay_figures_limit outrelay_consumer_held_messages outrelay_consumer_rate_waiting_lanes " +
		"outrelay_service_connections outrelay_service_checkout_seconds outrelay_service_checkouts_failed_total")
	rows := map[string]string{}
	for _, m := range regexp.MustCompile("(?m)^\\| `(outrelay_[a-z_]+)(?:\\{([a-z_, ]*)\\})?` \\| ([^|]+) \\| ([^|]+) \\| ([^|]+) \\|$").FindAllStringSubmatch(doc, -1) {
		if rows[m[1]] != "" {
			t.Errorf("docs/metrics.md explains %s twice", m[1])
		}
		f, ok := all[m[1]]
		labels := splitWords(strings.ReplaceAll(m[2], ",", " "))
		slices.Sort(labels)
		if !ok || !slices.Equal(labels, f.labels) {
			t.Errorf("docs/metrics.md has %s with labels %v, want %v", m[1], labels, f.labels)
		}
		rows[m[1]] = m[0]
	}

	for _, name := range slices.Sorted(maps.Keys(all)) {
		if !strings.HasPrefix(name, "outrelay_") {
			continue
		}
		if rows[name] == "" {
			t.Errorf("docs/metrics.md does not explain %s", name)
		}
		if !regexp.MustCompile(`\b`+name+`(_bucket)?\b`).MatchString(shown.String()) && !slices.Contains(unshown, name) {
			t.Errorf("neither the dashboard nor an alert shows %s", name)
		}
	}

	for _, name := range regexp.MustCompile(`\boutrelay_[a-z_]+\b`).FindAllString(doc, -1) {
		if _, ok := all[name]; !ok && !strings.HasPrefix(name, "outrelay_consumer_*") {
			if _, ok := findSeries(all, name); !ok {
				t.Errorf("docs/metrics.md names %s, which does not exist", name)
			}
		}
	}
}

// All documents name only metrics, alerts and state collections of this version.
func TestDocumentsNameMetricsAndAlertsOfThisVersion(t *testing.T) {
	t.Parallel()
	all := collectMetrics(t)
	known := map[string]bool{"outrelay_marker": true} // which package state creates first, apart from its table
	for _, g := range readRules(t).Groups {
		for _, a := range g.Rules {
			known[a.Alert] = true
		}
	}
	for _, c := range state.Table() {
		known["outrelay_"+c.Name] = true
	}

	names := 0
	for _, pattern := range []string{"*.md", "docs/*.md", "docs/*/*.md"} {
		paths, err := filepath.Glob("../../" + pattern)
		if err != nil {
			t.Fatal(err)
		}
		for _, path := range paths {
			text := readRepoFile(t, strings.TrimPrefix(filepath.ToSlash(path), "../../"))
			for _, name := range regexp.MustCompile("`outrelay_[a-z_]+[a-z]|`Outrelay[A-Z][A-Za-z]+").FindAllString(string(text), -1) {
				names++
				name = strings.Trim(name, "`")
				_, isMetric := all[name]
				_, isSeries := findSeries(all, name)
				if !isMetric && !isSeries && !known[name] {
					t.Errorf("%s names %s, which is neither a metric nor an alert nor a state collection", path, name)
				}
			}
		}
	}
	if names < 100 {
		t.Errorf("found only %d names", names)
	}
}
