package arch

import (
	"os/exec"
	"slices"
	"strings"
	"testing"
)

// TestServicesLinkFewModules: a service that appends events links the MongoDB driver with its
// dependencies, and otherwise only the modules in this table. A new module needs a reason.
func TestServicesLinkFewModules(t *testing.T) {
	t.Parallel()
	driver := linkedModules(t, "go.mongodb.org/mongo-driver/v2/mongo")
	for _, c := range []struct {
		pkg     string
		allowed []string
	}{
		{"./pkg/event", []string{"github.com/google/uuid"}},
		{"./pkg/codec", nil},
		{"./pkg/outbox", []string{
			"github.com/google/uuid",
			// The API of OpenTelemetry with its global providers, and the modules that it requires.
			"go.opentelemetry.io/otel", "go.opentelemetry.io/otel/trace", "go.opentelemetry.io/otel/metric", "go.opentelemetry.io/otel/log",
			"go.opentelemetry.io/auto/sdk", "github.com/cespare/xxhash/v2", "github.com/go-logr/logr", "github.com/go-logr/stdr",
		}},
	} {
		for _, m := range linkedModules(t, c.pkg) {
			if m != module && !slices.Contains(driver, m) && !slices.Contains(c.allowed, m) {
				t.Errorf("%s links %s", c.pkg, m)
			}
		}
	}

	if len(driver) < 2 {
		t.Errorf("the driver links %q", driver)
	}
}

// TestConsumersLinkFranzOnlyIfTheyImportIt: package pkg/consumer/franz is the only one that brings franz-go.
func TestConsumersLinkFranzOnlyIfTheyImportIt(t *testing.T) {
	t.Parallel()
	const franz = "github.com/twmb/franz-go"
	for pkg, want := range map[string]bool{"./pkg/consumer": false, "./pkg/saga": false, "./pkg/consumer/franz": true} {
		if got := slices.Contains(linkedModules(t, pkg), franz); got != want {
			t.Errorf("%s links %s: %t, want %t", pkg, franz, got, want)
		}
	}
}

// linkedModules returns the modules of the packages that pkg links, without the standard library.
func linkedModules(t *testing.T, pkg string) []string {
	t.Helper()
	list := exec.CommandContext(t.Context(), "go", "list", "-deps", "-f", "{{with .Module}}{{.Path}}{{end}}", pkg)
	list.Dir = "../.."
	out, err := list.Output()
	if err != nil {
		t.Fatal(err)
	}

	modules := strings.Fields(string(out))
	slices.Sort(modules)
	return slices.Compact(modules)
}
