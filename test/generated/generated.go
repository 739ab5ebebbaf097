// Package generated compares files of the repository with what a test makes from the code, and writes them for
// `go run ./test/regenerate`. Call its functions in the body of a test, where that command finds them.
package generated

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// Variable is the environment variable that makes the tests write their files.
const Variable = "OUTRELAY_REGENERATE"

// IsWriting reports whether the files are written. A test that reads its own file must not compare it then.
func IsWriting() bool { return os.Getenv(Variable) != "" }

// Check fails the test if a file differs from want. name is its path from the root of the repository.
func Check(t testing.TB, name, want string) {
	t.Helper()
	file := filepath.Join(findRoot(t), filepath.FromSlash(name))
	have, err := os.ReadFile(file)
	if err != nil && !os.IsNotExist(err) {
		t.Fatal(err)
	}
	if string(have) == want {
		return
	}

	if IsWriting() {
		if err := os.WriteFile(file, []byte(want), 0o644); err != nil { //nolint:gosec // a public document
			t.Fatal(err)
		}
		return
	}
	t.Errorf("%s differs from the code at line %d: run go run ./test/regenerate", name, firstDifference(string(have), want))
}

// CheckBlocks is [Check] for a page with parts by hand. Each part between `<!-- generated: NAME -->` and `<!-- end -->` must be
// what block returns for NAME. The page must have all names, each once.
func CheckBlocks(t testing.TB, name string, names []string, block func(name string) string) {
	t.Helper()
	page, err := os.ReadFile(filepath.Join(findRoot(t), filepath.FromSlash(name)))
	if err != nil {
		t.Fatal(err)
	}

	want := string(page)
	for _, part := range names {
		begin := "<!-- generated: " + part + " -->\n"
		before, rest, found := strings.Cut(want, begin)
		_, after, ends := strings.Cut(rest, "<!-- end -->")
		if !found || !ends || strings.Contains(after, begin) {
			t.Fatalf("%s has not exactly one block %q that ends with <!-- end -->", name, part)
		}
		want = before + begin + block(part) + "<!-- end -->" + after
	}
	if count := strings.Count(want, "<!-- generated: "); count != len(names) {
		t.Errorf("%s has %d generated blocks, and there are %d", name, count, len(names))
	}
	Check(t, name, want)
}

// firstDifference returns the number of the first line that differs.
func firstDifference(a, b string) int {
	other := strings.Split(b, "\n")
	for i, line := range strings.Split(a, "\n") {
		if i >= len(other) || other[i] != line {
			return i + 1
		}
	}
	return strings.Count(a, "\n") + 1
}

// findRoot returns the directory of go.mod. Tests run in the directory of their package.
func findRoot(t testing.TB) string {
	t.Helper()
	dir, err := os.Getwd()
	for ; err == nil; dir = filepath.Dir(dir) {
		if _, missing := os.Stat(filepath.Join(dir, "go.mod")); missing == nil {
			return dir
		}
		if dir == filepath.Dir(dir) {
			break
		}
	}
	t.Fatalf("no go.mod above the test: %v", err)
	return ""
}
