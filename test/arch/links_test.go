package arch

import (
	"os/exec"
	"strings"
	"testing"
)

// TestServicesLinkNoPartThatTheyDoNotUse: a service links the houses that its packages need, and nothing of the relay.
func TestServicesLinkNoPartThatTheyDoNotUse(t *testing.T) {
	t.Parallel()
	for pkg, unwanted := range map[string][]string{
		"./pkg/event":               {"internal/base/metrics", "internal/mongodb", "internal/kafkawire", "internal/service", "internal/relay"},
		"./pkg/outbox":              {"internal/base/metrics", "internal/kafkawire", "internal/service/inbox", "internal/service/transport", "internal/relay"},
		"./pkg/inbox":               {"internal/base/metrics", "internal/kafkawire", "internal/service/transport", "internal/relay"},
		"./pkg/consumer/deadletter": {"internal/kafkawire", "internal/service/transport", "internal/relay"},
		"./pkg/consumer":            {"internal/service/transport/franz", "internal/relay", "internal/operate", "internal/lab"},
		"./pkg/saga":                {"internal/relay", "internal/operate", "internal/lab"},
		"./pkg/relay":               {"internal/operate", "internal/lab"},
		"./pkg/outboxtest":          {"internal/lab/devstack", "internal/relay", "internal/operate"},
		"./internal/operate/admin":  {"internal/relay/internal", "internal/relay/process", "internal/lab"},
	} {
		list := exec.CommandContext(t.Context(), "go", "list", "-deps", pkg)
		list.Dir = "../.."
		out, err := list.Output()
		if err != nil {
			t.Fatal(err)
		}
		for _, linked := range strings.Fields(string(out)) {
			// It has only the texts of metrics.
			if linked == module+"/internal/base/metrics/catalog" {
				continue
			}
			for _, dir := range unwanted {
				if isWithin(linked, module+"/"+dir) {
					t.Errorf("%s links %s", pkg, linked)
				}
			}
		}
	}
}
