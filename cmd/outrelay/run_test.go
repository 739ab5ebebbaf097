package main

import (
	"runtime/debug"
	"testing"
)

// This test is not parallel, because the settings of the garbage collector are global.
func TestTheEnvironmentWinsOverOurMemoryPolicy(t *testing.T) {
	percent, limit := debug.SetGCPercent(100), debug.SetMemoryLimit(-1)
	t.Cleanup(func() { debug.SetGCPercent(percent); debug.SetMemoryLimit(limit) })
	now := func() (int, int64) {
		p := debug.SetGCPercent(100)
		debug.SetGCPercent(p)
		return p, debug.SetMemoryLimit(-1)
	}

	limitMemory([]string{"GOGC=100", "GOMEMLIMIT=1GiB"}, 32<<20)
	if p, l := now(); p != 100 || l != limit {
		t.Errorf("GOGC is %d %%, memory limit is %d bytes", p, l)
	}

	limitMemory(nil, 32<<20)
	if p, l := now(); p != heapGrowth || l != 48<<20 {
		t.Errorf("GOGC is %d %%, memory limit is %d bytes", p, l)
	}
}
