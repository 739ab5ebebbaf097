package pages

import (
	"fmt"
	"strings"
	"testing"

	"github.com/outrelay/outrelay/internal/relay/problems"
	"github.com/outrelay/outrelay/test/generated"
)

// The page of symptoms has a row for each kind of problem, in the words of the list of problems.
func TestTroubleshootingPageIsGenerated(t *testing.T) {
	t.Parallel()
	generated.CheckBlocks(t, "docs/troubleshooting.md", []string{"problems"}, func(string) string {
		var b strings.Builder
		b.WriteString("\n| kind | problem | severity | if nobody acts | fix |\n|---|---|---|---|---|\n")

		for _, spec := range problems.Specs() {
			severities := make([]string, len(spec.Severities))
			for i, severity := range spec.Severities {
				severities[i] = string(severity)
			}

			fmt.Fprintf(&b, "| `%s` | %s | %s | %s | %s |\n", spec.Kind, spec.Title, strings.Join(severities, ", "), spec.Consequence, spec.Fix)
		}
		b.WriteByte('\n')
		return b.String()
	})
}
