package stacktest

import (
	"flag"
	"strconv"
)

// Wide runs n tests of a package concurrently, unless the command line sets another number. It is for
// packages whose tests mostly wait for leases, timeouts and servers. TestMain calls it before the tests run.
func Wide(n int) {
	flag.Parse()
	const name = "test.parallel"
	given := false
	flag.Visit(func(flag *flag.Flag) { given = given || flag.Name == name })
	if !given {
		_ = flag.Set(name, strconv.Itoa(n))
	}
}
