//go:build unix

package kafkaconnect

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// Maven only warns about a damaged download unless it gets this option, and the cache would keep the file for good.
func TestDamagedDownloadsAreRejected(t *testing.T) {
	bin := t.TempDir()
	if err := os.WriteFile(filepath.Join(bin, "mvn"), []byte("#!/bin/sh\necho \"$*\"\nexit 1\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	t.Setenv("PATH", bin)
	t.Setenv("HOME", t.TempDir())
	t.Setenv("XDG_CACHE_HOME", t.TempDir())

	if _, err := Fetch(t.Context(), Debezium); err == nil || !strings.Contains(err.Error(), "--strict-checksums") {
		t.Errorf("%v, want the options of Maven", err)
	}
}
