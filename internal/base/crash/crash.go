// Package crash marks the points at which a test can kill the process with SIGKILL. The points have an effect only in a program
// that was linked for such tests:
//
//	go build -ldflags "-X github.com/outrelay/outrelay/internal/base/crash.enabled=yes"
//
// In such a program, OUTRELAY_CRASH_AT=<name>[:n] kills the process when it passes the named point for the n-th time. The default
// of n is 1.
package crash

import (
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
)

// enabled is set by the linker. It is a variable and not a build tag, so that tests and tools use the compiled packages of the product.
var enabled string

var (
	target = sync.OnceValue(func() point { return parsePoint(os.Getenv("OUTRELAY_CRASH_AT")) })
	passes atomic.Int64
)

// point is the chosen crash point.
type point struct {
	name string
	pass int64
}

// parsePoint parses <name>[:n]. It panics if n is not a positive number.
func parsePoint(text string) point {
	name, count, found := strings.Cut(text, ":")
	if !found {
		return point{name, 1}
	}

	pass, err := strconv.ParseInt(count, 10, 64)
	if err != nil || pass < 1 {
		panic("OUTRELAY_CRASH_AT: want <name>[:n] with n ≥ 1, got " + strconv.Quote(text))
	}
	return point{name, pass}
}

// At kills the process with SIGKILL at the n-th pass of the chosen point. It does not return then.
func At(name string) {
	if enabled != "" {
		killAt(name)
	}
}

func killAt(name string) {
	if chosen := target(); name != chosen.name || passes.Add(1) != chosen.pass {
		return
	}

	process, err := os.FindProcess(os.Getpid())
	if err != nil {
		panic(err)
	}
	if err := process.Kill(); err != nil {
		panic(err)
	}

	// The signal arrives asynchronously.
	select {}
}
