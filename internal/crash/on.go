//go:build crashpoints

// Package crash marks the points at which a test can kill the process with SIGKILL.
// OUTRELAY_CRASH_AT=<name>[:n] kills the process when it passes the named point for the n-th time. The
// default of n is 1.
package crash

import (
	"os"
	"strconv"
	"strings"
	"sync/atomic"
)

var (
	targetPoint, targetPass = parseTarget(os.Getenv("OUTRELAY_CRASH_AT"))
	passes                  atomic.Int64
)

// parseTarget parses <name>[:n]. It panics if n is not a positive number.
func parseTarget(s string) (name string, pass int64) {
	name, count, found := strings.Cut(s, ":")
	if !found {
		return name, 1
	}

	pass, err := strconv.ParseInt(count, 10, 64)
	if err != nil || pass < 1 {
		panic("OUTRELAY_CRASH_AT: want <name>[:n] with n ≥ 1, got " + strconv.Quote(s))
	}
	return name, pass
}

// At kills the process with SIGKILL at the n-th pass of the chosen point. It does not return then.
func At(point string) {
	if point != targetPoint || passes.Add(1) != targetPass {
		return
	}

	p, err := os.FindProcess(os.Getpid())
	if err != nil {
		panic(err)
	}
	if err := p.Kill(); err != nil {
		panic(err)
	}

	// The signal arrives asynchronously.
	select {}
}
