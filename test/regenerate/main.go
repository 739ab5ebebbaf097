// Command regenerate writes every file of the repository that is made from the code: the reference of the configuration, of commands, of
// the API and of metrics, the schema, the listings of the public packages, and others. The tests of these files compare them.
package main

import (
	"context"
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"os/signal"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"github.com/outrelay/outrelay/test/generated"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := regenerate(ctx); err != nil {
		stop()
		fmt.Fprintln(os.Stderr, "regenerate:", err)
		os.Exit(1)
	}
}

// regenerate runs the tests that use package generated, with the variable that makes them write.
func regenerate(ctx context.Context) error {
	tests, err := findTests(".")
	if err != nil {
		return err
	}
	if len(tests) == 0 {
		return errors.New("no tests: run it in the root of the repository")
	}

	names := map[string]bool{}
	for _, list := range tests {
		for _, name := range list {
			names[name] = true
		}
	}
	args := []string{"test", "-count=1", "-run", "^(" + strings.Join(slices.Sorted(maps.Keys(names)), "|") + ")$"}
	cmd := exec.CommandContext(ctx, "go", append(args, slices.Sorted(maps.Keys(tests))...)...)
	cmd.Env = append(os.Environ(), generated.Variable+"=1")
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	return cmd.Run()
}

// findTests returns the names of the tests that call package generated, by their directory.
func findTests(root string) (map[string][]string, error) {
	tests := map[string][]string{}
	err := filepath.WalkDir(root, func(file string, entry fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case entry.IsDir() && file != root && (strings.HasPrefix(entry.Name(), ".") || entry.Name() == "node_modules" || entry.Name() == "testdata"):
			return fs.SkipDir
		case entry.IsDir() || !strings.HasSuffix(file, "_test.go"):
			return nil
		}

		f, err := parser.ParseFile(token.NewFileSet(), file, nil, parser.SkipObjectResolution)
		if err != nil {
			return err
		}
		dir := "./" + path.Dir(filepath.ToSlash(file))
		for _, decl := range f.Decls {
			if fn, ok := decl.(*ast.FuncDecl); ok && strings.HasPrefix(fn.Name.Name, "Test") && callsGenerated(fn) {
				tests[dir] = append(tests[dir], fn.Name.Name)
			}
		}
		return nil
	})
	return tests, err
}

// callsGenerated reports whether the test compares a file.
func callsGenerated(fn *ast.FuncDecl) (found bool) {
	ast.Inspect(fn, func(n ast.Node) bool {
		if expr, ok := n.(*ast.SelectorExpr); ok && strings.HasPrefix(expr.Sel.Name, "Check") {
			ident, ok := expr.X.(*ast.Ident)
			found = found || ok && ident.Name == "generated"
		}
		return !found
	})
	return found
}
