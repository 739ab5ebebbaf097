package arch

import (
	"bytes"
	"go/ast"
	"go/doc"
	"go/parser"
	"go/printer"
	"go/token"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/outrelay/outrelay/test/generated"
)

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
		// The comparison below names each declaration.
		if generated.IsWriting() {
			generated.Check(t, "test/arch/api/"+name, listing)
		}

		have, err := os.ReadFile(path)
		if err != nil && !os.IsNotExist(err) {
			t.Fatal(err)
		}
		for _, line := range findDifference(string(have), listing) {
			t.Errorf("%s: removed or changed: %s", dir, line)
		}
		for _, line := range findDifference(listing, string(have)) {
			t.Errorf("%s: added or changed: %s", dir, line)
		}
	}

	entries, err := os.ReadDir("api")
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if !want[e.Name()] && e.Name() != "renamed.txt" {
			t.Errorf("test/arch/api/%s lists a package that does not exist: remove it", e.Name())
		}
	}
	if t.Failed() {
		t.Log("if the change is intended, add it to CHANGELOG.md and run: go run ./test/regenerate")
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

// findDifference returns the lines of a that b does not have.
func findDifference(a, b string) (lines []string) {
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
	files := parseDir(t, set, dir, false)
	pkg, err := doc.NewFromFiles(set, files, "github.com/outrelay/outrelay/"+dir)
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
				named = withFields(t, set, files, named)
				named.Doc, named.Comment = nil, nil
				add(named)
			}
		}
	}
	slices.Sort(lines)
	return strings.Join(lines, "\n") + "\n"
}

// withFields returns the declaration of a public name for an internal struct with the fields of that struct: they are part of the API.
func withFields(t *testing.T, set *token.FileSet, files []*ast.File, named *ast.TypeSpec) *ast.TypeSpec {
	t.Helper()
	selected, ok := named.Type.(*ast.SelectorExpr)
	if !ok {
		return named
	}

	room := selected.X.(*ast.Ident).Name
	for _, f := range files {
		for _, i := range f.Imports {
			dir, internal := strings.CutPrefix(strings.Trim(i.Path.Value, `"`), "github.com/outrelay/outrelay/internal/")
			if !internal || filepath.Base(dir) != room {
				continue
			}
			for _, source := range parseDir(t, set, "internal/"+dir, false) {
				if found := findType(source, selected.Sel.Name); found != nil {
					return &ast.TypeSpec{Name: named.Name, Assign: named.Assign, Type: found}
				}
			}
		}
	}
	return named
}

// findType returns the struct that a file declares with a name, or nil.
func findType(f *ast.File, name string) ast.Expr {
	for _, d := range f.Decls {
		g, ok := d.(*ast.GenDecl)
		if !ok {
			continue
		}

		for _, spec := range g.Specs {
			if n, ok := spec.(*ast.TypeSpec); ok && n.Name.Name == name {
				if _, isStruct := n.Type.(*ast.StructType); isStruct {
					return n.Type
				}
			}
		}
	}
	return nil
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

// TestOptionsStateTheirDefaults: readers need the default to judge whether to set a number or a duration.
func TestOptionsStateTheirDefaults(t *testing.T) {
	t.Parallel()
	n := 0
	for _, dir := range publicPackages(t) {
		set := token.NewFileSet()
		for _, f := range parseDir(t, set, dir, false, parser.ParseComments) {
			for _, d := range f.Decls {
				fn, ok := d.(*ast.FuncDecl)
				if !ok || fn.Recv != nil || !strings.HasPrefix(fn.Name.Name, "With") || !takesQuantity(fn) {
					continue
				}
				if n++; !regexp.MustCompile(`(?i)\bdefault|required|without it`).MatchString(fn.Doc.Text()) {
					t.Errorf("%s: the comment of %s states no default", dir, fn.Name.Name)
				}
			}
		}
	}

	if n < 20 {
		t.Errorf("only %d options were found", n)
	}
}

// takesQuantity reports whether a parameter of fn is a number or a duration.
func takesQuantity(fn *ast.FuncDecl) bool {
	for _, p := range fn.Type.Params.List {
		var name string
		switch typ := p.Type.(type) {
		case *ast.Ident:
			name = typ.Name
		case *ast.SelectorExpr:
			name = typ.Sel.Name
		}

		if slices.Contains([]string{"int", "int32", "int64", "float64", "Duration"}, name) {
			return true
		}
	}
	return false
}

// TestSignaturesContainNoTypesOfOtherLibraries: a new major version of a library must not be one of outrelay as well. The driver
// of MongoDB is the exception, because services pass its contexts, databases and documents, and so are UUIDs as ids of entities.
func TestSignaturesContainNoTypesOfOtherLibraries(t *testing.T) {
	t.Parallel()
	allowed := []string{"go.mongodb.org/mongo-driver/v2/", "github.com/outrelay/outrelay/"}
	for _, dir := range publicPackages(t) {
		set := token.NewFileSet()
		for _, f := range parseDir(t, set, dir, false) {
			// The names by which the file refers to packages of other libraries.
			foreign := map[string]string{}
			for _, spec := range f.Imports {
				path := strings.Trim(spec.Path.Value, `"`)
				if first, _, _ := strings.Cut(path, "/"); !strings.Contains(first, ".") ||
					slices.ContainsFunc(allowed, func(a string) bool { return strings.HasPrefix(path, a) }) {
					continue
				}
				name := strings.TrimSuffix(filepath.Base(path), "-go")
				if spec.Name != nil {
					name = spec.Name.Name
				}
				foreign[name] = path
			}

			if dir == "pkg/entity" {
				delete(foreign, "uuid")
			}

			for _, found := range findForeign(f, foreign) {
				t.Errorf("%s: %s", dir, found)
			}
		}
	}
}

// findForeign returns the uses of the packages foreign in the exported declarations of f, without the bodies of functions.
func findForeign(f *ast.File, foreign map[string]string) (found []string) {
	ast.FileExports(f)
	ast.Inspect(f, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.BlockStmt:
			return false
		case *ast.SelectorExpr:
			if x, ok := n.X.(*ast.Ident); ok && foreign[x.Name] != "" {
				found = append(found, "a signature contains "+x.Name+"."+n.Sel.Name+" of "+foreign[x.Name])
			}
		}
		return true
	})
	return found
}

func TestAForeignTypeInASignatureIsFound(t *testing.T) {
	t.Parallel()
	const source = `package x
import kafka "github.com/segmentio/kafka-go"
type inside struct{ W *kafka.Writer }
type Sink interface{ Write(m kafka.Message) }
func F() { _ = kafka.Writer{} }
func G(w *kafka.Writer) {}
`

	f, err := parser.ParseFile(token.NewFileSet(), "x.go", source, parser.ParseComments)
	if err != nil {
		t.Fatal(err)
	}
	if got := findForeign(f, map[string]string{"kafka": "github.com/segmentio/kafka-go"}); len(got) != 2 {
		t.Errorf("found %v, want the method of Sink and the argument of G", got)
	}
}
