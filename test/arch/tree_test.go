package arch

import (
	"bytes"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
)

const module = "github.com/outrelay/outrelay"

// source is one parsed Go file. Paths are relative to the module and use slashes.
type source struct {
	path, dir string
	test      bool // a _test.go file, or any file below test/
	lines     int
	fset      *token.FileSet
	ast       *ast.File
}

// parseSource parses a file with this name and text.
func parseSource(tb testing.TB, name string, text []byte) source {
	tb.Helper()
	fset := token.NewFileSet()
	f, err := parser.ParseFile(fset, name, text, parser.ParseComments|parser.SkipObjectResolution)
	if err != nil {
		tb.Fatal(err)
	}
	return source{
		path: name, dir: path.Dir(name),
		test:  strings.HasSuffix(name, "_test.go") || strings.HasPrefix(name, "test/"),
		lines: bytes.Count(text, []byte("\n")),
		fset:  fset, ast: f,
	}
}

// importPaths returns the import paths of the file.
func (s source) importPaths(tb testing.TB) []string {
	tb.Helper()
	var out []string
	for _, i := range s.ast.Imports {
		p, err := strconv.Unquote(i.Path.Value)
		if err != nil {
			tb.Fatal(err)
		}
		out = append(out, p)
	}
	return out
}

// moduleRoot returns the directory with go.mod.
func moduleRoot(tb testing.TB) string {
	tb.Helper()
	dir, err := os.Getwd()
	if err != nil {
		tb.Fatal(err)
	}

	for {
		if _, err := os.Stat(filepath.Join(dir, "go.mod")); err == nil {
			return dir
		}
		up := filepath.Dir(dir)
		if up == dir {
			tb.Fatal("no go.mod above the working directory")
		}
		dir = up
	}
}

// parseModule parses all Go files of the module, except files that the go command ignores.
func parseModule(tb testing.TB) []source {
	tb.Helper()
	top := moduleRoot(tb)
	var out []source
	err := filepath.WalkDir(top, func(p string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}

		name := d.Name()
		if d.IsDir() {
			if p != top && (strings.HasPrefix(name, ".") || strings.HasPrefix(name, "_") || name == "testdata") {
				return filepath.SkipDir
			}
			return nil
		}
		if !strings.HasSuffix(name, ".go") || strings.HasPrefix(name, ".") || strings.HasPrefix(name, "_") {
			return nil
		}

		text, err := os.ReadFile(p)
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(top, p)
		if err != nil {
			return err
		}
		out = append(out, parseSource(tb, filepath.ToSlash(rel), text))
		return nil
	})
	if err != nil {
		tb.Fatal(err)
	}
	if len(out) == 0 {
		tb.Fatal("no Go files found")
	}
	return out
}

// reportProblems fails the test with each problem.
func reportProblems(t *testing.T, problems []string) {
	t.Helper()
	for _, p := range problems {
		t.Error(p)
	}
}

// expectProblem checks the result of a rule: exactly one message that contains want, or no message if
// want is "".
func expectProblem(t *testing.T, got []string, want string) {
	t.Helper()
	switch {
	case want == "" && len(got) > 0:
		t.Errorf("problems %q, want none", got)
	case want != "" && (len(got) != 1 || !strings.Contains(got[0], want)):
		t.Errorf("problems %q, want one that contains %q", got, want)
	}
}
