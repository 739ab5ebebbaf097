package inventory_test

import (
	"fmt"
	"slices"
	"testing"

	"github.com/outrelay/outrelay/internal/service/inventory"
)

func TestConfiguredDatabasesAreChosenBeforeThoseOfOutboxes(t *testing.T) {
	t.Parallel()
	var tenants []string
	for n := range 200 {
		tenants = append(tenants, fmt.Sprintf("a%03d", n))
	}

	chosen := inventory.ChooseDatabases([]string{"shipping", "billing", "shipping", "a001"}, tenants)
	if len(chosen) != 100 || !slices.IsSorted(chosen) || chosen[98] != "billing" || chosen[99] != "shipping" || len(slices.Compact(chosen)) != 100 {
		t.Errorf("chosen: %q", chosen)
	}
}
