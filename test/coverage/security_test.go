package coverage

import (
	"os"
	"path/filepath"
	"testing"
)

// Every test that the threat model calls a proof is there.
func TestThreatsNameTestsThatExist(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile(filepath.Join(top, "SECURITY.md"))
	if err != nil {
		t.Fatal(err)
	}
	names := testName.FindAllStringSubmatch(string(text), -1)
	if len(names) < 25 {
		t.Errorf("%d tests are named", len(names))
	}
	dirs := map[string]map[string]bool{}
	for _, m := range names {
		if dirs[m[1]] == nil {
			dirs[m[1]] = tests(t, m[1])
		}
		if !dirs[m[1]][m[2]] {
			t.Errorf("%s has no %s", m[1], m[2])
		}
	}
}
