package arch

import (
	"bytes"
	"flag"
	"go/ast"
	"go/doc"
	"go/printer"
	"go/token"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

var updateAPI = flag.Bool("update-api", false, "write the listings of the public packages")

// TestPublicAPIIsListed compares the exported declarations of each public package with its checked-in
// listing, so that no change of the API goes unnoticed in a review (CONTRIBUTING.md, Compatibility).
func TestPublicAPIIsListed(t *testing.T) {
	t.Parallel()
	want := map[string]bool{}
	for _, dir := range publicPackages(t) {
		name := strings.ReplaceAll(dir, "/", "_") + ".txt"
		want[name] = true
		listing := listExported(t, dir)
		path := filepath.Join("api", name)
		if *updateAPI {
			if err := os.WriteFile(path, []byte(listing), 0o644); err != nil {
				t.Fatal(err)
			}
		}

		have, err := os.ReadFile(path)
		if err != nil && !os.IsNotExist(err) {
			t.Fatal(err)
		}
		for _, line := range difference(string(have), listing) {
			t.Errorf("%s: removed or changed: %s", dir, line)
		}
		for _, line := range difference(listing, string(have)) {
			t.Errorf("%s: added or changed: %s", dir, line)
		}
	}

	entries, err := os.ReadDir("api")
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if !want[e.Name()] {
			t.Errorf("test/arch/api/%s lists a package that does not exist: remove it", e.Name())
		}
	}
	if t.Failed() {
		t.Log("if the change is intended, add it to CHANGELOG.md and run: go test ./test/arch -run TestPublicAPIIsListed -update-api")
	}
}

// publicPackages returns the directories of the packages that other modules can import.
func publicPackages(t *testing.T) (dirs []string) {
	t.Helper()
	for _, tree := range []string{"pkg", "resume"} {
		err := filepath.WalkDir(filepath.Join("..", "..", tree), func(path string, e os.DirEntry, err error) error {
			if err == nil && strings.HasSuffix(path, ".go") && !strings.HasSuffix(path, "_test.go") {
				dir, relErr := filepath.Rel(filepath.Join("..", ".."), filepath.Dir(path))
				dirs = append(dirs, filepath.ToSlash(dir))
				return relErr
			}
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	slices.Sort(dirs)
	return slices.Compact(dirs)
}

// difference returns the lines of a that b does not have.
func difference(a, b string) (lines []string) {
	other := strings.Split(b, "\n")
	for line := range strings.SplitSeq(a, "\n") {
		if !slices.Contains(other, line) {
			lines = append(lines, line)
		}
	}
	return lines
}

// listExported returns the exported declarations of a package without comments and bodies, sorted, one per line.
func listExported(t *testing.T, dir string) string {
	t.Helper()
	set := token.NewFileSet()
	pkg, err := doc.NewFromFiles(set, parseDir(t, set, dir, false), "github.com/outrelay/outrelay/"+dir)
	if err != nil {
		t.Fatal(err)
	}

	var lines []string
	add := func(node ast.Node) {
		var b bytes.Buffer
		if err := printer.Fprint(&b, set, node); err != nil {
			t.Fatal(err)
		}
		// One line for each declaration, field and method of an interface.
		for line := range strings.SplitSeq(b.String(), "\n") {
			if line = strings.Join(strings.Fields(line), " "); line != "" && line != ")" && line != "}" {
				lines = append(lines, prefixOf(node)+line)
			}
		}
	}
	values := func(list []*doc.Value) {
		for _, v := range list {
			for _, spec := range v.Decl.Specs {
				add(spec)
			}
		}
	}
	functions := func(list []*doc.Func) {
		for _, f := range list {
			f.Decl.Body, f.Decl.Doc = nil, nil
			add(f.Decl)
		}
	}

	values(pkg.Consts)
	values(pkg.Vars)
	functions(pkg.Funcs)
	for _, typ := range pkg.Types {
		values(typ.Consts)
		values(typ.Vars)
		functions(typ.Funcs)
		functions(typ.Methods)
		for _, spec := range typ.Decl.Specs {
			if named, ok := spec.(*ast.TypeSpec); ok && named.Name.Name == typ.Name {
				named.Doc, named.Comment = nil, nil
				add(named)
			}
		}
	}
	slices.Sort(lines)
	return strings.Join(lines, "\n") + "\n"
}

// prefixOf returns the type that the lines of a declaration belong to, so that lines of different types differ.
func prefixOf(node ast.Node) string {
	switch n := node.(type) {
	case *ast.TypeSpec:
		return n.Name.Name + ": "
	case *ast.ValueSpec:
		return "value "
	default:
		return ""
	}
}

// TestOptionsBeginWithWith: the options of all packages look alike.
func TestOptionsBeginWithWith(t *testing.T) {
	t.Parallel()
	// Steps of a saga read as a sentence, and franz.Use contains options.
	other := []string{"By", "Sequenced", "Use"}
	option := regexp.MustCompile(`^func (\w+)(\[.*?\])?\(.*\) [\w.]*Option(\[.*\])?$`)
	n := 0
	for _, dir := range publicPackages(t) {
		for line := range strings.SplitSeq(listExported(t, dir), "\n") {
			m := option.FindStringSubmatch(line)
			if m == nil {
				continue
			}
			if n++; !strings.HasPrefix(m[1], "With") && !slices.Contains(other, m[1]) {
				t.Errorf("%s: the name of the option %s does not begin with With", dir, m[1])
			}
		}
	}
	if n < 50 {
		t.Errorf("only %d options were found", n)
	}
}
