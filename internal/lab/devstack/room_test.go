package devstack

import (
	"math"
	"strings"
	"testing"
)

// A server ends when its disk is full, so a start on a full disk names the disk and the remedy instead of the end of a log.
func TestAStartNeedsFreeSpace(t *testing.T) {
	dir := t.TempDir()
	if err := checkRoom(dir, 1); err != nil {
		t.Error(err)
	}

	err := checkRoom(dir, math.MaxInt64)
	if err == nil {
		t.Fatal("no error although no disk has that much space")
	}
	for _, want := range []string{dir, "MiB of free space", "XDG_CACHE_HOME"} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("got %q, want %q in it", err, want)
		}
	}
}
