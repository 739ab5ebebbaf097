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

// A database stays in the list while its outbox does not exist. The number of watched databases has a bound, that of the consumers has none.
func TestConfiguredDatabases(t *testing.T) {
	t.Parallel()
	watch := []string{"shop.outbox", "tenant_*.outbox", "billing.outbox", "shop.more"}
	if got := inventory.ConfiguredDatabases([]string{"billing"}, watch); !slices.Equal(got, []string{"billing", "shop"}) {
		t.Errorf("got %q", got)
	}

	for i := range 200 {
		watch = append(watch, fmt.Sprintf("tenant%d.outbox", i))
	}
	if got := inventory.ConfiguredDatabases(nil, watch); len(got) != 100 || got[0] != "shop" {
		t.Errorf("%d databases: %q", len(got), got)
	}
}
