package arch

import (
	"go/ast"
	"go/doc"
	"go/parser"
	"go/token"
	"path/filepath"
	"strings"
	"testing"
)

// TestConstructorsHaveExamples requires that an Example of the same package calls each function that returns a type of a
// public package. Options are exempt: their names and comments suffice.
func TestConstructorsHaveExamples(t *testing.T) {
	t.Parallel()
	for _, dir := range publicPackages(t) {
		shown := namesInExamples(t, dir)
		for _, name := range findConstructors(t, dir) {
			if !shown[name] {
				t.Errorf("%s: no Example calls %s", dir, name)
			}
		}
	}
}

// findConstructors returns the names of the functions of a package that return one of its types, or a type of another public
// package, such as a middleware or a codec.
func findConstructors(t *testing.T, dir string) (names []string) {
	t.Helper()
	set := token.NewFileSet()
	pkg, err := doc.NewFromFiles(set, parseDir(t, set, dir, false), "github.com/outrelay/outrelay/"+dir)
	if err != nil {
		t.Fatal(err)
	}

	for _, f := range pkg.Funcs {
		if returnsForeignType(f.Decl) {
			names = append(names, f.Name)
		}
	}
	for _, typ := range pkg.Types {
		if strings.HasSuffix(typ.Name, "Option") {
			continue
		}
		for _, f := range typ.Funcs {
			// Only packages of this module can name the arguments of NewOver.
			if !strings.HasPrefix(f.Name, "With") && f.Name != "NewOver" {
				names = append(names, f.Name)
			}
		}
	}
	return names
}

// foreignTypes are the types of public packages that functions of other packages return.
var foreignTypes = map[string]bool{
	"codec.Codec": true, "consumer.Middleware": true, "consumer.Handler": true, "outbox.Middleware": true, "event.Event": true, "telemetry.Sink": true,
}

func returnsForeignType(f *ast.FuncDecl) bool {
	if f.Type.Results == nil {
		return false
	}
	for _, result := range f.Type.Results.List {
		if s, ok := result.Type.(*ast.SelectorExpr); ok {
			if pkg, ok := s.X.(*ast.Ident); ok && foreignTypes[pkg.Name+"."+s.Sel.Name] {
				return true
			}
		}
	}
	return false
}

// namesInExamples returns all names that the Examples of a package mention, and the tests in the same files: a function that
// takes a testing.TB can be shown only by a test.
func namesInExamples(t *testing.T, dir string) map[string]bool {
	t.Helper()
	names := map[string]bool{}
	set := token.NewFileSet()
	for _, file := range parseDir(t, set, dir, true) {
		isExample := strings.HasPrefix(filepath.Base(set.Position(file.Pos()).Filename), "example")

		for _, decl := range file.Decls {
			f, ok := decl.(*ast.FuncDecl)
			if !ok || !isExample && !strings.HasPrefix(f.Name.Name, "Example") {
				continue
			}

			ast.Inspect(f.Body, func(n ast.Node) bool {
				if id, ok := n.(*ast.Ident); ok {
					names[id.Name] = true
				}
				return true
			})
		}
	}
	return names
}

// parseDir parses the tests of a directory, or the files that are no tests.
func parseDir(t *testing.T, set *token.FileSet, dir string, tests bool, modes ...parser.Mode) (files []*ast.File) {
	t.Helper()
	paths, err := filepath.Glob(filepath.Join("..", "..", dir, "*.go"))
	if err != nil {
		t.Fatal(err)
	}

	mode := parser.SkipObjectResolution
	for _, m := range modes {
		mode |= m
	}

	for _, path := range paths {
		if strings.HasSuffix(path, "_test.go") != tests {
			continue
		}

		file, err := parser.ParseFile(set, path, nil, mode)
		if err != nil {
			t.Fatal(err)
		}
		files = append(files, file)
	}
	return files
}
