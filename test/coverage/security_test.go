package coverage

import (
	"os"
	"path/filepath"
	"testing"
)

// TestThreatsNameTestsThatExist checks that each test in the threat model exists.
func TestThreatsNameTestsThatExist(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile(filepath.Join(top, "SECURITY.md"))
	if err != nil {
		t.Fatal(err)
	}

	names := testName.FindAllStringSubmatch(string(text), -1)
	if len(names) < 25 {
		t.Errorf("SECURITY.md names %d tests, want at least 25", len(names))
	}

	dirs := map[string]map[string]testFunction{}
	for _, m := range names {
		if dirs[m[1]] == nil {
			dirs[m[1]] = listTests(t, m[1])
		}
		if !dirs[m[1]][m[2]].exists {
			t.Errorf("SECURITY.md: %s has no %s", m[1], m[2])
		}
	}
}
