package main

import (
	"runtime/debug"
	"testing"
)

// This test is not parallel, because the memory limit is global.
func TestTheEnvironmentWinsOverOurMemoryLimit(t *testing.T) {
	before := debug.SetMemoryLimit(-1)
	t.Cleanup(func() { debug.SetMemoryLimit(before) })

	limitMemory([]string{"GOMEMLIMIT=1GiB"}, 32<<20)
	if now := debug.SetMemoryLimit(-1); now != before {
		t.Errorf("the memory limit is %d bytes, want %d", now, before)
	}

	limitMemory(nil, 32<<20)
	if now := debug.SetMemoryLimit(-1); now != 48<<20 {
		t.Errorf("the memory limit is %d bytes", now)
	}
}
