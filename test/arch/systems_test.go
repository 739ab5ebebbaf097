package arch

import (
	"encoding/json"
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"go/types"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// TestOtherSystemsCompile type-checks all packages, with their tests, for macOS and Windows: the relay runs wherever Go does, and no
// server of these systems is needed to see that a file does not compile there. One architecture is enough, because no file depends on it.
// Compiling would take a hundred times as long.
func TestOtherSystemsCompile(t *testing.T) {
	t.Parallel()
	for _, system := range []string{"darwin/arm64", "windows/amd64"} {
		t.Run(system, func(t *testing.T) {
			t.Parallel()
			reportProblems(t, checkSystem(t, system, "./..."))
		})
	}
}

// listedPackage is a package as `go list` describes it.
type listedPackage struct {
	Dir, ImportPath string
	GoFiles         []string
	ImportMap       map[string]string
	Module          *struct{ Main bool }
}

// checkSystem returns the errors of the type checker in the packages of this module that match pattern.
func checkSystem(t *testing.T, system, pattern string) (problems []string) {
	t.Helper()
	goos, goarch, _ := strings.Cut(system, "/")
	list := exec.CommandContext(t.Context(), "go", "list", "-deps", "-test", "-json=Dir,ImportPath,GoFiles,ImportMap,Module", pattern)
	list.Dir = filepath.Join("..", "..")
	list.Env = append(os.Environ(), "GOOS="+goos, "GOARCH="+goarch, "CGO_ENABLED=0")
	out, err := list.Output()
	if err != nil {
		t.Fatalf("go list for %s: %v", system, err)
	}

	// The list contains each package after the packages that it imports.
	known := map[string]*types.Package{"unsafe": types.Unsafe}
	files := token.NewFileSet()
	decoder := json.NewDecoder(strings.NewReader(string(out)))
	for {
		var p listedPackage
		err := decoder.Decode(&p)
		if errors.Is(err, io.EOF) {
			return problems
		}
		if err != nil {
			t.Fatal(err)
		}
		// The program that runs the tests of a package is generated.
		if p.ImportPath == "unsafe" || strings.HasSuffix(p.ImportPath, ".test") {
			continue
		}

		own := p.Module != nil && p.Module.Main
		known[p.ImportPath], err = checkPackage(files, p, own, known, types.SizesFor("gc", goarch))
		if own && err != nil {
			problems = append(problems, fmt.Sprintf("%s: %v", system, err))
		}
	}
}

type importerFunc func(path string) (*types.Package, error)

func (f importerFunc) Import(path string) (*types.Package, error) { return f(path) }

// checkPackage type-checks one package. It skips the bodies of functions of other modules.
func checkPackage(files *token.FileSet, p listedPackage, own bool, known map[string]*types.Package, sizes types.Sizes) (*types.Package, error) {
	var parsed []*ast.File
	for _, name := range p.GoFiles {
		if !filepath.IsAbs(name) {
			name = filepath.Join(p.Dir, name)
		}
		f, err := parser.ParseFile(files, name, nil, parser.SkipObjectResolution)
		if err != nil {
			return nil, err
		}
		parsed = append(parsed, f)
	}

	var problems []error
	config := types.Config{
		IgnoreFuncBodies: !own, Sizes: sizes,
		Error: func(err error) { problems = append(problems, err) },
		Importer: importerFunc(func(path string) (*types.Package, error) {
			if mapped := p.ImportMap[path]; mapped != "" {
				path = mapped
			}
			if known[path] == nil {
				return nil, fmt.Errorf("package %s is not in the list", path)
			}
			return known[path], nil
		}),
	}
	checked, _ := config.Check(p.ImportPath, files, parsed, nil)
	return checked, errors.Join(problems...)
}
