package catalog

import (
	"regexp"
	"strings"
	"testing"
)

// A help is one sentence without Markdown links, because /metrics serves it. A cell of a table has one line.
func TestTextsOfMetricsFit(t *testing.T) {
	t.Parallel()
	for _, s := range sections {
		for _, m := range s.metrics {
			if !strings.HasSuffix(m.Help, ".") || strings.Contains(m.Help, ". ") || strings.Contains(m.Help, "](") {
				t.Errorf("%s: the help is not one sentence: %s", m.Name, m.Help)
			}

			if strings.ContainsAny(m.Help+m.Detail+m.Fix, "|\n") || m.Unit == "" {
				t.Errorf("%s: a text does not fit into a table", m.Name)
			}
			if !regexp.MustCompile(`^outrelay_[a-z_]+$`).MatchString(m.Name) {
				t.Errorf("%s is no name of a metric", m.Name)
			}
		}
	}
}
