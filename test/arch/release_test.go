package arch

import (
	"os/exec"
	"strings"
	"testing"
)

// TestAReleaseContainsOnlyTheProduct: a release build links neither the demonstration nor the benchmark nor the servers that
// both start.
func TestAReleaseContainsOnlyTheProduct(t *testing.T) {
	t.Parallel()
	tools := []string{"internal/lab/demo", "internal/lab/bench", "internal/lab/devstack"}

	for tags, linked := range map[string]bool{"release": false, "": true} {
		list := exec.CommandContext(t.Context(), "go", "list", "-tags", tags, "-deps", "./cmd/outrelay")
		list.Dir = "../.."
		out, err := list.Output()
		if err != nil {
			t.Fatalf("go list -tags %q: %v", tags, err)
		}

		for _, tool := range tools {
			if got := strings.Contains(string(out), "github.com/outrelay/outrelay/"+tool+"\n"); got != linked {
				t.Errorf("with tags %q the program links %s: %v, want %v", tags, tool, got, linked)
			}
		}
	}
}
