package pages

import (
	"testing"

	"github.com/outrelay/outrelay/internal/base/metrics/catalog"
	"github.com/outrelay/outrelay/test/generated"
)

// The tables of the page are those of the catalog.
func TestMetricsPageIsGenerated(t *testing.T) {
	t.Parallel()
	generated.CheckBlocks(t, "docs/metrics.md", catalog.Titles(), catalog.Table)
}
