package deploy

import (
	"bytes"
	"encoding/json"
	"maps"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"github.com/outrelay/outrelay/internal/contract/config"
	"github.com/outrelay/outrelay/test/generated"
)

// chartFile returns a file of the Helm chart.
func chartFile(t *testing.T, path ...string) []byte {
	t.Helper()
	return readRepoFile(t, append([]string{"deploy", "helm", "outrelay"}, path...)...)
}

// Helm reads no files outside of the chart, so it contains copies, which go run ./test/regenerate writes.
func TestChartHasTheAlertsAndTheDashboard(t *testing.T) {
	t.Parallel()
	for copied, original := range map[string][]string{
		"alerts.yaml":   {"deploy", "prometheus", "alerts.yaml"},
		"outrelay.json": {"deploy", "grafana", "outrelay.json"},
	} {
		generated.Check(t, "deploy/helm/outrelay/files/"+copied, string(readRepoFile(t, original...)))
	}
}

// The schema of the values contains that of the configuration; all else in it is written by hand. Helm 3.17 and earlier
// support at most draft 7, so the schema may use only keywords that both drafts have.
func TestChartSchemaHasTheConfiguration(t *testing.T) {
	t.Parallel()
	var values, configuration map[string]any
	if err := json.Unmarshal(chartFile(t, "values.schema.json"), &values); err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(config.Schema(), &configuration); err != nil {
		t.Fatal(err)
	}
	delete(configuration, "$schema")
	delete(configuration, "$id")
	configuration["description"] = "The content of outrelay.yaml."
	removeForms(configuration, "", config.Forms())
	values["properties"].(map[string]any)["config"] = configuration

	var text bytes.Buffer
	encoder := json.NewEncoder(&text)
	encoder.SetEscapeHTML(false)
	encoder.SetIndent("", "  ")
	if err := encoder.Encode(values); err != nil {
		t.Fatal(err)
	}
	generated.Check(t, "deploy/helm/outrelay/values.schema.json", text.String())

	for _, later := range []string{`"$defs"`, `"$ref"`, `"prefixItems"`, `"unevaluatedProperties"`, `"dependentRequired"`} {
		if strings.Contains(text.String(), later) {
			t.Errorf("the schema uses %s, which draft 7 does not have", later)
		}
	}
}

// removeForms leaves only the types in the properties of a schema that have a form. Helm would report an expression or several
// alternatives in place of an example.
func removeForms(schema map[string]any, prefix string, forms map[string]config.Form) {
	properties, _ := schema["properties"].(map[string]any)
	for name, value := range properties {
		property := value.(map[string]any)
		if _, ok := forms[prefix+name]; !ok {
			removeForms(property, prefix+name+".", forms)
			continue
		}

		if alternatives, ok := property["anyOf"].([]any); ok {
			// The first one is a type or a list of words; the other one is a reference.
			kind := alternatives[0].(map[string]any)["type"]
			property["type"] = "string"
			if kind != nil {
				property["type"] = []any{kind, "string"}
			}
		}
		if property["items"] != nil {
			property["items"] = map[string]any{"type": "string"}
		}
		for _, name := range []string{"anyOf", "pattern", "patternErrorMessage", "minimum", "maximum"} {
			delete(property, name)
		}
	}
}

// The templates check the forms and ranges of the configuration, so that a message has an example.
func TestChartHasTheForms(t *testing.T) {
	t.Parallel()
	var text bytes.Buffer
	encoder := json.NewEncoder(&text)
	encoder.SetEscapeHTML(false)
	encoder.SetIndent("", "  ")
	if err := encoder.Encode(config.Forms()); err != nil {
		t.Fatal(err)
	}
	generated.Check(t, "deploy/helm/outrelay/files/forms.json", text.String())
}

// The schema has each value, and the defaults comply with it.
func TestChartValues(t *testing.T) {
	t.Parallel()
	values := decodeManifest[map[string]any](t, chartFile(t, "values.yaml"))
	var schema struct{ Properties map[string]any }
	if err := json.Unmarshal(chartFile(t, "values.schema.json"), &schema); err != nil {
		t.Fatal(err)
	}
	for _, name := range slices.Sorted(maps.Keys(values)) {
		if schema.Properties[name] == nil {
			t.Errorf("the schema does not contain the value %s", name)
		}
	}

	for _, name := range slices.Sorted(maps.Keys(schema.Properties)) {
		if _, ok := values[name]; !ok && name != "global" {
			t.Errorf("values.yaml does not contain the value %s", name)
		}
	}
}

// Everything that needs an operator, or that not everybody wants, is off.
func TestOptionalObjectsAreOff(t *testing.T) {
	t.Parallel()
	values := decodeManifest[map[string]any](t, chartFile(t, "values.yaml"))

	optional := 0
	for name, value := range values {
		if section, ok := value.(map[string]any); ok {
			if enabled, has := section["enabled"]; has {
				optional++
				if enabled != false {
					t.Errorf("%s is enabled by default", name)
				}
			}
		}
	}
	if optional < 7 {
		t.Errorf("%d optional objects, want at least 7", optional)
	}
}

// A machine without helm makes no check of the charts. The end of the output lists that, and in CI it is a failure.
func TestSkippedChartsAreListed(t *testing.T) {
	t.Parallel()
	run := func(env ...string) (output string, err error) {
		cmd := exec.CommandContext(t.Context(), "bash", repoPath(t, ".ci", "run"), "charts")
		// Without modules, nothing can be installed.
		cmd.Env = append(os.Environ(), append(env, "OUTRELAY_CI_WORK=", "OUTRELAY_CI_TOOLS="+t.TempDir(), "GOMODCACHE="+t.TempDir(), "GOPROXY=off", "GOTOOLCHAIN=local")...)
		text, err := cmd.CombinedOutput()
		return string(text), err
	}

	output, err := run("OUTRELAY_CI_COMPLETE=")
	if _, summary, _ := strings.Cut(output, "-- charts: ok"); err != nil || !strings.Contains(summary, "SKIPPED: the charts: helm") {
		t.Errorf("the summary does not name the check: %v\n%s", err, output)
	}
	if output, err := run("OUTRELAY_CI_COMPLETE=1"); err == nil || !strings.Contains(output, "-- charts: FAILED") {
		t.Errorf("a complete run skips the check: %v\n%s", err, output)
	}
}
