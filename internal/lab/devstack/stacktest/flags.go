package stacktest

import (
	"flag"
	"strings"
	"testing"
)

// OnlyWith skips a test that takes too long for every run, unless one of the flags differs from its default.
// why is the reason. No other function may skip a test: a test that just returned would be reported as PASS.
// docs/testing.md lists the tests that call OnlyWith, and test/arch checks the list.
func OnlyWith(tb testing.TB, why string, flags ...string) {
	tb.Helper()
	for _, name := range flags {
		option := flag.Lookup(name)
		if option == nil {
			tb.Fatalf("no test flag has the name %q", name)
		}
		if option.Value.String() != option.DefValue {
			return
		}
	}
	tb.Skipf("runs only with -%s: %s", strings.Join(flags, " or -"), why)
}
