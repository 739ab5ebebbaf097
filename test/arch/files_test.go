package arch

import (
	"fmt"
	"go/ast"
	"os"
	"path"
	"slices"
	"strings"
	"testing"
)

const maxLines = 500 // of a file that is no test: beyond it, a reader loses the room for a change

// badNames say nothing about what a package is for.
var badNames = []string{"base", "common", "helper", "helpers", "lib", "manager", "misc", "shared", "util", "utils"}

// topLevel is what may stand beside go.mod. Names with a leading dot may too.
var topLevel = []string{
	"go.mod", "go.sum", "cmd", "pkg", "internal", "resume", "test", "docs", "examples", "deploy",
	"README.md", "DESIGN.md", "CHANGELOG.md", "LICENSE", "SECURITY.md", "CONTRIBUTING.md",
	"Dockerfile", "compose.yaml", "outrelay.example.yaml", "outrelay.schema.json",
}

// built by hand and ignored by git.
var built = []string{"outrelay", "dist"}

func TestTopLevelNames(t *testing.T) {
	t.Parallel()
	entries, err := os.ReadDir(root(t))
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		n := e.Name()
		if strings.HasPrefix(n, ".") || slices.Contains(topLevel, n) || slices.Contains(built, n) ||
			strings.HasSuffix(n, ".test") || strings.HasSuffix(n, ".prof") {
			continue
		}
		t.Errorf("%s: not among the names at the top of the module; find it a room or add it to the list with a reason", n)
	}
}

func TestFilesAndNames(t *testing.T) {
	t.Parallel()
	report(t, fileProblems(tree(t)))
}

func TestNoSleepAndNoSkipInTests(t *testing.T) {
	t.Parallel()
	report(t, waitProblems(tree(t)))
}

func TestFileRuleSeesWrongFiles(t *testing.T) {
	t.Parallel()
	long := "package x\n" + strings.Repeat("\n", maxLines)
	for _, c := range []struct{ file, text, want string }{
		{"internal/lease/a.go", "package lease\n", ""},
		{"internal/lease/a.go", long, "501 lines"},
		{"internal/lease/a_test.go", long, ""},
		{"internal/utils/a.go", "package utils\n", "says nothing"},
		{"internal/lease/a.go", "package helpers\n", "says nothing"},
	} {
		finds(t, fileProblems([]source{parse(t, c.file, []byte(c.text))}), c.want)
	}
}

func TestWaitRuleSeesSleepsAndSkips(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ file, text, want string }{
		{"internal/lease/a_test.go", `func f() { time.Sleep(1) }`, "time.Sleep"},
		{"test/fault/a.go", `func f() { time.Sleep(1) }`, "time.Sleep"},
		{"internal/lease/a.go", `func f() { time.Sleep(1) }`, ""},
		{"internal/lease/a_test.go", `func f(t *testing.T) { t.Skip("x") }`, "Skip"},
		{"internal/lease/a_test.go", `func f(t *testing.T) { t.SkipNow() }`, "Skip"},
		{"internal/lease/a_test.go", `func f(t *testing.T) { synctest.Test(t, func(t *testing.T) { time.Sleep(1) }) }`, ""},
	} {
		finds(t, waitProblems([]source{parse(t, c.file, []byte("package x\n"+c.text+"\n"))}), c.want)
	}
}

func fileProblems(files []source) []string {
	var out []string
	for _, f := range files {
		if !f.test && f.lines > maxLines {
			out = append(out, fmt.Sprintf("%s: %d lines, above %d", f.path, f.lines, maxLines))
		}
		pkg := strings.TrimSuffix(f.ast.Name.Name, "_test")
		if slices.Contains(badNames, pkg) || slices.Contains(badNames, path.Base(f.dir)) {
			out = append(out, fmt.Sprintf("%s: the name of package %s says nothing about it", f.path, pkg))
		}
	}
	return out
}

// waitProblems finds sleeps and skips in tests. A sleep in a bubble of synctest passes in no time and is as good as a
// signal, so it is let through.
func waitProblems(files []source) []string {
	var out []string
	for _, f := range files {
		if !f.test {
			continue
		}
		var bubbles []ast.Node
		ast.Inspect(f.ast, func(n ast.Node) bool {
			call, ok := n.(*ast.CallExpr)
			if !ok {
				return true
			}
			sel, ok := call.Fun.(*ast.SelectorExpr)
			if !ok {
				return true
			}
			x, _ := sel.X.(*ast.Ident)
			at := f.fset.Position(call.Pos())
			switch name := sel.Sel.Name; {
			case x != nil && x.Name == "synctest" && name == "Test":
				bubbles = append(bubbles, call)
			case x != nil && x.Name == "time" && name == "Sleep":
				inside := slices.ContainsFunc(bubbles, func(b ast.Node) bool { return b.Pos() <= call.Pos() && call.End() <= b.End() })
				if !inside {
					out = append(out, fmt.Sprintf("%s: time.Sleep; wait for a signal, or until a deadline for a condition", at))
				}
			case name == "Skip" || name == "Skipf" || name == "SkipNow":
				out = append(out, fmt.Sprintf("%s: %s; a test that cannot run fails", at, name))
			}
			return true
		})
	}
	return out
}
