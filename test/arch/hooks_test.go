package arch

import (
	"fmt"
	"go/ast"
	"strings"
	"testing"
)

// A program does nothing because it links a package: a reader of main finds everything that happens.
func TestNothingRunsBeforeMain(t *testing.T) {
	t.Parallel()
	reportProblems(t, initProblems(parseModule(t)))
}

func TestInitRuleSeesFunctions(t *testing.T) {
	t.Parallel()

	for _, c := range []struct{ file, text, want string }{
		{"pkg/outbox/a.go", "func init() {}", "init"},
		{"examples/orders/a.go", "func init() { f() }", "init"},
		{"pkg/outbox/a.go", "type t struct{}; func (t) init() {}", ""},
		{"pkg/outbox/a_test.go", "func init() {}", ""},
		{"internal/lab/devstack/stacktest/a.go", "func init() {}", ""},
	} {
		expectProblem(t, initProblems([]source{parseSource(t, c.file, []byte("package x\n"+c.text+"\n"))}), c.want)
	}
}

// initProblems finds functions that run before main. Tests may have them: a test program has no main of its own.
func initProblems(files []source) []string {
	var out []string
	for _, f := range files {
		if isForTests(f.dir) || strings.HasSuffix(f.path, "_test.go") {
			continue
		}

		for _, d := range f.ast.Decls {
			if fn, ok := d.(*ast.FuncDecl); ok && fn.Recv == nil && fn.Name.Name == "init" {
				out = append(out, fmt.Sprintf("%s: func init: pass the value to the function that needs it", f.fset.Position(fn.Pos())))
			}
		}
	}
	return out
}
