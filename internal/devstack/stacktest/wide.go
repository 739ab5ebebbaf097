package stacktest

import (
	"flag"
	"strconv"
)

// Wide has the tests of a package run n at a time, unless the command line says how many: for packages whose tests wait for
// leases, time-outs and servers most of their time. For TestMain, before the tests run.
func Wide(n int) {
	flag.Parse()
	const name = "test.parallel"
	given := false
	flag.Visit(func(f *flag.Flag) { given = given || f.Name == name })
	if !given {
		_ = flag.Set(name, strconv.Itoa(n))
	}
}
