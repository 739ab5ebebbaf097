package stacktest

import (
	"flag"
	"strings"
	"testing"
)

// OnlyWith skips a test that takes too long for each run, unless one of the flags is set to another value
// than its default; why says what takes long. It is the only place that may skip: a test that returned
// would be reported as PASS. The README lists the tests that call it, which test/arch checks.
func OnlyWith(tb testing.TB, why string, flags ...string) {
	tb.Helper()
	for _, name := range flags {
		f := flag.Lookup(name)
		if f == nil {
			tb.Fatalf("no test flag has the name %q", name)
		}
		if f.Value.String() != f.DefValue {
			return
		}
	}
	tb.Skipf("runs only with -%s: %s", strings.Join(flags, " or -"), why)
}
