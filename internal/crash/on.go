//go:build crashpoints

// Package crash holds the points at which a test may kill the process with SIGKILL: OUTRELAY_CRASH_AT=<name>[:n] kills at
// the n-th pass (default the first) of the point of that name.
package crash

import (
	"os"
	"strconv"
	"strings"
	"sync/atomic"
)

var (
	name, after = parse(os.Getenv("OUTRELAY_CRASH_AT"))
	passed      atomic.Int64
)

func parse(s string) (string, int64) {
	n, count, found := strings.Cut(s, ":")
	if !found {
		return n, 1
	}
	k, err := strconv.ParseInt(count, 10, 64)
	if err != nil || k < 1 {
		panic("OUTRELAY_CRASH_AT: want <name>[:n] with n ≥ 1, got " + strconv.Quote(s))
	}
	return n, k
}

// At kills the process with SIGKILL when it is the chosen point and passed often enough.
func At(point string) {
	if point != name || passed.Add(1) != after {
		return
	}
	p, err := os.FindProcess(os.Getpid())
	if err != nil {
		panic(err)
	}
	if err := p.Kill(); err != nil {
		panic(err)
	}
	select {} // SIGKILL is on its way
}
