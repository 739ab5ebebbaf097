package deploy

import (
	"bytes"
	"encoding/json"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"

	"github.com/outrelay/outrelay/internal/contract/config"
)

// chartFile returns a file of the Helm chart.
func chartFile(t *testing.T, path ...string) []byte {
	t.Helper()
	return readRepoFile(t, append([]string{"deploy", "helm", "outrelay"}, path...)...)
}

// Helm reads no files outside of the chart, so it contains copies.
func TestChartHasTheAlertsAndTheDashboard(t *testing.T) {
	t.Parallel()
	for copied, original := range map[string][]string{
		"alerts.yaml":   {"deploy", "prometheus", "alerts.yaml"},
		"outrelay.json": {"deploy", "grafana", "outrelay.json"},
	} {
		if !bytes.Equal(chartFile(t, "files", copied), readRepoFile(t, original...)) {
			t.Errorf("deploy/helm/outrelay/files/%s is not current: copy %s over it", copied, filepath.Join(original...))
		}
	}
}

// The default configuration of the chart is valid, and the schema contains each value.
func TestChartValues(t *testing.T) {
	t.Parallel()
	var values map[string]any
	if err := yaml.Unmarshal(chartFile(t, "values.yaml"), &values); err != nil {
		t.Fatal(err)
	}
	var schema struct{ Properties map[string]any }
	if err := json.Unmarshal(chartFile(t, "values.schema.json"), &schema); err != nil {
		t.Fatal(err)
	}
	for _, name := range slices.Sorted(maps.Keys(values)) {
		if schema.Properties[name] == nil {
			t.Errorf("the schema does not contain the value %s", name)
		}
	}

	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "mongodb-uri"), []byte("mongodb://mongodb:27017/shop?replicaSet=rs0"), 0o600); err != nil {
		t.Fatal(err)
	}
	text, err := yaml.Marshal(values["config"])
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(dir, "outrelay.yaml")
	if err := os.WriteFile(file, []byte(strings.ReplaceAll(string(text), "/run/secrets/outrelay", dir)), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, warnings, err := config.Load(file, nil, nil); err != nil || len(warnings) > 0 {
		t.Errorf("%v %v", err, warnings)
	}
}
