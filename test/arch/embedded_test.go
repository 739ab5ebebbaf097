package arch

import (
	"os/exec"
	"slices"
	"strings"
	"testing"
)

// TestTheEmbeddedRelayLinksNoOperatorsPage: a service that embeds pkg/relay contains neither page nor API nor CLI.
func TestTheEmbeddedRelayLinksNoOperatorsPage(t *testing.T) {
	t.Parallel()
	list := exec.CommandContext(t.Context(), "go", "list", "-deps", "./pkg/relay")
	list.Dir = "../.."
	out, err := list.Output()
	if err != nil {
		t.Fatal(err)
	}
	linked := strings.Fields(string(out))

	const module = "github.com/outrelay/outrelay/"
	for _, unwanted := range []string{
		module + "internal/operate/operators", module + "internal/operate/httpapi", module + "internal/operate/opspage", module + "internal/operate/admin",
		"github.com/danielgtaylor/huma/v2", "github.com/spf13/cobra",
	} {
		if slices.Contains(linked, unwanted) {
			t.Errorf("pkg/relay links %s", unwanted)
		}
	}
}
