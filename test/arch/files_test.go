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

// maxLines is the maximum length of a file that is not a test. A longer file leaves no room for changes.
const maxLines = 500

// badNames are package names that do not describe a purpose.
var badNames = []string{"base", "common", "helper", "helpers", "lib", "manager", "misc", "shared", "util", "utils"}

// topLevel lists the names next to go.mod. Names with a leading dot are allowed as well.
var topLevel = []string{
	"go.mod", "go.sum", "mkdocs.yml", "cmd", "pkg", "internal", "resume", "test", "docs", "examples", "deploy",
	"README.md", "DESIGN.md", "CHANGELOG.md", "LICENSE", "SECURITY.md", "CONTRIBUTING.md",
	"CODE_OF_CONDUCT.md", "GOVERNANCE.md", "ROADMAP.md", "SUPPORT.md", // where GitHub shows them to contributors
	"Dockerfile", "compose.yaml", "outrelay.example.yaml", "outrelay.schema.json",
}

// buildOutputs are ignored by git.
var buildOutputs = []string{"outrelay", "dist", "release-files"}

func TestTopLevelNames(t *testing.T) {
	t.Parallel()
	entries, err := os.ReadDir(moduleRoot(t))
	if err != nil {
		t.Fatal(err)
	}

	for _, e := range entries {
		n := e.Name()
		if strings.HasPrefix(n, ".") || slices.Contains(topLevel, n) || slices.Contains(buildOutputs, n) ||
			strings.HasSuffix(n, ".test") || strings.HasSuffix(n, ".prof") {
			continue
		}
		t.Errorf("%s is not a known name at the top of the module: move it, or add it to the list with a reason", n)
	}
}

func TestFilesAndNames(t *testing.T) {
	t.Parallel()
	reportProblems(t, fileProblems(parseModule(t)))
}

func TestNoSleepAndNoSkipInTests(t *testing.T) {
	t.Parallel()
	reportProblems(t, waitProblems(parseModule(t)))
}

func TestFileRuleSeesWrongFiles(t *testing.T) {
	t.Parallel()
	long := "package x\n" + strings.Repeat("\n", maxLines)
	for _, c := range []struct{ file, text, want string }{
		{"internal/relay/stored/lease/a.go", "package lease\n", ""},
		{"internal/relay/stored/lease/a.go", long, "501 lines"},
		{"internal/relay/stored/lease/a_test.go", long, ""},
		{"internal/utils/a.go", "package utils\n", "does not state"},
		{"internal/relay/stored/lease/a.go", "package helpers\n", "does not state"},
	} {
		expectProblem(t, fileProblems([]source{parseSource(t, c.file, []byte(c.text))}), c.want)
	}
}

func TestWaitRuleSeesSleepsAndSkips(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ file, text, want string }{
		{"internal/relay/stored/lease/a_test.go", `func f() { time.Sleep(1) }`, "time.Sleep"},
		{"test/fault/a.go", `func f() { time.Sleep(1) }`, "time.Sleep"},
		{"internal/relay/stored/lease/a.go", `func f() { time.Sleep(1) }`, ""},
		{"internal/relay/stored/lease/a_test.go", `func f(t *testing.T) { t.Skip("x") }`, "Skip"},
		{"internal/relay/stored/lease/a_test.go", `func f(t *testing.T) { t.SkipNow() }`, "Skip"},
		{"internal/lab/devstack/stacktest/flags.go", `func OnlyWith(t testing.TB) { t.Skipf("x") }`, ""},
		{"test/fault/a_test.go", `var long = flag.Bool("l", false, ""); func TestA(t *testing.T) { if !*long { return }; f() }`, "OnlyWith"},
		{"test/fault/a_test.go", `var n = flag.Int("l", 0, ""); func TestA(t *testing.T) { if *n == 0 { t.Log("x"); return }; f() }`, "OnlyWith"},
		{"test/fault/a_test.go", `var long = flag.Bool("l", false, ""); func cases() []string { if !*long { return nil }; return all }`, "OnlyWith"},
		{"test/fault/a_test.go", `var long = flag.Bool("l", false, ""); func cases() []string { if *long { return all }; return nil }`, "OnlyWith"},
		{"test/fault/a_test.go", `var long = flag.Bool("l", false, ""); func rounds(few, many int) int { if *long { return many }; return few }`, ""},
		{"internal/relay/stored/lease/a_test.go", `func f(t *testing.T) { synctest.Test(t, func(t *testing.T) { time.Sleep(1) }) }`, ""},
	} {
		expectProblem(t, waitProblems([]source{parseSource(t, c.file, []byte("package x\n"+c.text+"\n"))}), c.want)
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
			out = append(out, fmt.Sprintf("%s: the package name %s does not state its purpose", f.path, pkg))
		}
	}
	return out
}

// waitProblems finds sleeps and skips in tests. A sleep inside synctest.Test is allowed, because it
// takes no real time.
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
					out = append(out, fmt.Sprintf("%s: time.Sleep: wait for a signal, or poll a condition until a deadline", at))
				}
			case (name == "Skip" || name == "Skipf" || name == "SkipNow") && f.path != onlyWith:
				out = append(out, fmt.Sprintf("%s: %s: a test that cannot run must fail", at, name))
			}
			return true
		})
	}

	return append(out, emptyWithoutFlag(files)...)
}

// onlyWith is the file of stacktest.OnlyWith, the only function that may skip tests.
const onlyWith = "internal/lab/devstack/stacktest/flags.go"

// emptyWithoutFlag finds tests that do nothing unless a flag is set. go test would report PASS for them.
func emptyWithoutFlag(files []source) []string {
	// flags contains the variables of flag.Bool and similar functions, as directory.name.
	flags := map[string]bool{}
	for _, f := range files {
		ast.Inspect(f.ast, func(n ast.Node) bool {
			v, ok := n.(*ast.ValueSpec)
			for i := 0; ok && i < len(v.Values); i++ {
				if call, ok := v.Values[i].(*ast.CallExpr); ok && selectsFrom(call.Fun, "flag") {
					flags[f.dir+"."+v.Names[i].Name] = true
				}
			}
			return true
		})
	}

	var out []string
	for _, f := range files {
		if !f.test {
			continue
		}
		for _, d := range f.ast.Decls {
			fn, ok := d.(*ast.FuncDecl)
			if !ok || fn.Body == nil {
				continue
			}
			for i, stmt := range fn.Body.List {
				cond, ok := stmt.(*ast.IfStmt)
				if !ok || !mentionsFlag(cond.Cond, f.dir, flags) {
					continue
				}

				// The body of the if statement, or the rest of the function, is empty.
				if returnsNothing(cond.Body.List) || i+2 == len(fn.Body.List) && returnsNothing(fn.Body.List[i+1:]) {
					out = append(out, fmt.Sprintf("%s: without its flag, %s does nothing and passes: use stacktest.OnlyWith", f.fset.Position(stmt.Pos()), fn.Name.Name))
				}
			}
		}
	}
	return out
}

// selectsFrom reports whether e selects a name of the package pkg.
func selectsFrom(e ast.Expr, pkg string) bool {
	sel, ok := e.(*ast.SelectorExpr)
	if !ok {
		return false
	}
	x, ok := sel.X.(*ast.Ident)
	return ok && x.Name == pkg
}

// mentionsFlag reports whether e dereferences one of the flags.
func mentionsFlag(e ast.Expr, dir string, flags map[string]bool) bool {
	found := false
	ast.Inspect(e, func(n ast.Node) bool {
		star, ok := n.(*ast.StarExpr)
		if ok {
			x, ok := star.X.(*ast.Ident)
			found = found || ok && flags[dir+"."+x.Name]
		}
		return true
	})
	return found
}

// returnsNothing reports whether the statements end with `return` or `return nil`.
func returnsNothing(list []ast.Stmt) bool {
	if len(list) == 0 {
		return false
	}

	r, ok := list[len(list)-1].(*ast.ReturnStmt)
	if !ok || len(r.Results) > 1 {
		return false
	}
	if len(r.Results) == 0 {
		return true
	}

	x, ok := r.Results[0].(*ast.Ident)
	return ok && x.Name == "nil"
}

// TestReadmeNamesTestsThatNeedAFlag checks that docs/testing.md lists each test that runs only with a flag.
func TestReadmeNamesTestsThatNeedAFlag(t *testing.T) {
	t.Parallel()
	page, err := os.ReadFile("../../docs/testing.md")
	if err != nil {
		t.Fatal(err)
	}

	needFlag := map[string]bool{}
	for _, f := range parseModule(t) {
		for _, d := range f.ast.Decls {
			fn, ok := d.(*ast.FuncDecl)
			if !ok || !f.test || !strings.HasPrefix(fn.Name.Name, "Test") {
				continue
			}

			ast.Inspect(fn, func(n ast.Node) bool {
				if call, ok := n.(*ast.CallExpr); ok && selectsFrom(call.Fun, "stacktest") && call.Fun.(*ast.SelectorExpr).Sel.Name == "OnlyWith" {
					needFlag[fn.Name.Name] = true
				}
				return true
			})
		}
	}

	if len(needFlag) == 0 {
		t.Fatal("no test calls stacktest.OnlyWith")
	}
	for name := range needFlag {
		if !strings.Contains(string(page), "`"+name+"`") {
			t.Errorf("docs/testing.md does not list %s among the tests that need a flag", name)
		}
	}
}
