package arch

import (
	"fmt"
	"go/ast"
	"go/token"
	"path"
	"slices"
	"strings"
	"testing"
)

// exportedTogether are names that only their own package uses, and that are exported with others of their kind.
var exportedTogether = map[string]string{
	"internal/contract/routing.Connector": "the names of all presets",
}

// exportedTypes are packages whose types a library or an encoder reads, which needs exported names.
var exportedTypes = map[string]string{
	"internal/operate/httpapi": "huma reads the inputs and outputs of operations",
	"internal/lab/demo":        "the findings of scenarios are printed as JSON",
}

// declared is an exported name at the top level of a package.
type declared struct {
	name   string
	place  string
	isType bool
	isEnum bool // a constant of a type of the package: the values of a type are exported together
}

// TestExportsAreUsed checks that other packages, or the tests of the package from outside, use each exported name of an internal
// package. Types in the declarations of exported names count as used, and types of errors, whose fields callers may read. Methods and
// fields do not take part: interfaces and encoders require some of them.
func TestExportsAreUsed(t *testing.T) {
	t.Parallel()
	reportProblems(t, exportProblems(t, parseModule(t)))
}

func TestExportRuleSeesNeedlessNames(t *testing.T) {
	t.Parallel()
	const user = "package y\nimport \"" + module + "/internal/x\"\nvar _ = x.Used\n"
	for _, c := range []struct{ text, want string }{
		{"func Used() {}", ""},
		{"func Used() {}; func Unused() {}", "x.Unused is exported"},
		{"func Used() Result { return Result{} }; type Result struct{}", ""},
		{"func Used() {}; type Result struct{}", "x.Result is exported"},
		{"func Used() {}; func Other(Kind) {}; type Kind int", "x.Other is exported"},
		{"func Used() {}; type Kind int; const A Kind = 1", ""},
		{"const Used = A; const A = 1", "x.A is exported"},
		{"type Used struct{ F Field }; type Field struct{}", ""},
		{"type Used struct{ f field }; type field struct{ F Field }; type Field struct{}", "x.Field is exported"},
	} {
		sources := []source{
			parseSource(t, "internal/x/x.go", []byte("package x\n"+c.text+"\n")), parseSource(t, "internal/y/y.go", []byte(user)),
		}
		expectProblem(t, exportProblems(t, sources), c.want)
	}
}

// exportProblems returns a message for each needless exported name.
func exportProblems(tb testing.TB, sources []source) (problems []string) {
	tb.Helper()
	used := usedNames(tb, sources)
	types := namedTypes(sources)
	for _, s := range sources {
		if s.test || !strings.HasPrefix(s.dir, "internal/") {
			continue
		}

		for _, d := range declaredNames(s) {
			id := s.dir + "." + d.name
			isPart := d.isEnum || d.isType && (types[id] || exportedTypes[s.dir] != "" || strings.HasSuffix(d.name, "Error"))
			if used[id] || isPart || exportedTogether[id] != "" {
				continue
			}
			problems = append(problems, fmt.Sprintf("%s: %s.%s is exported, and no other package uses it", d.place, path.Base(s.dir), d.name))
		}
	}
	return problems
}

// usedNames returns the names that files use from other packages, as directory and name. A local variable with the name of an
// import may add names, which hides a needless export but reports no false one.
func usedNames(tb testing.TB, sources []source) map[string]bool {
	tb.Helper()
	packageNames := map[string]string{}
	for _, s := range sources {
		if !s.test {
			packageNames[s.dir] = s.ast.Name.Name
		}
	}

	used := map[string]bool{}
	for _, s := range sources {
		imported := map[string]string{}
		for i, p := range s.importPaths(tb) {
			dir, ok := strings.CutPrefix(p, module+"/")
			if !ok {
				continue
			}
			name := packageNames[dir]
			if as := s.ast.Imports[i].Name; as != nil {
				name = as.Name
			}
			imported[name] = dir
		}

		ast.Inspect(s.ast, func(n ast.Node) bool {
			if sel, ok := n.(*ast.SelectorExpr); ok {
				if x, ok := sel.X.(*ast.Ident); ok && imported[x.Name] != "" {
					used[imported[x.Name]+"."+sel.Sel.Name] = true
				}
			}
			return true
		})
	}
	return used
}

// declaredNames returns the exported names at the top level of a file.
func declaredNames(s source) (list []declared) {
	add := func(id *ast.Ident, isType, isEnum bool) {
		if id.IsExported() {
			list = append(list, declared{id.Name, s.path + ":" + fmt.Sprint(s.fset.Position(id.Pos()).Line), isType, isEnum})
		}
	}

	for _, decl := range s.ast.Decls {
		if f, ok := decl.(*ast.FuncDecl); ok && f.Recv == nil {
			add(f.Name, false, false)
		}
		d, ok := decl.(*ast.GenDecl)
		if !ok {
			continue
		}

		// With iota, only the first constant of a block has the type.
		typed := false
		for _, spec := range d.Specs {
			switch x := spec.(type) {
			case *ast.TypeSpec:
				add(x.Name, true, false)
			case *ast.ValueSpec:
				if len(x.Values) > 0 || x.Type != nil {
					_, typed = x.Type.(*ast.Ident)
				}
				for _, name := range x.Names {
					add(name, false, d.Tok == token.CONST && typed)
				}
			}
		}
	}
	return list
}

// namedTypes returns the types in the exported declarations of each package, as directory and name.
func namedTypes(sources []source) map[string]bool {
	named := map[string]bool{}
	for _, s := range sources {
		addTypes := func(n ast.Node) {
			for _, name := range typeNames(n) {
				named[s.dir+"."+name] = true
			}
		}

		for _, decl := range s.ast.Decls {
			switch d := decl.(type) {
			case *ast.FuncDecl:
				if d.Name.IsExported() {
					addTypes(d.Type)
				}
			case *ast.GenDecl:
				for _, spec := range d.Specs {
					switch x := spec.(type) {
					case *ast.TypeSpec:
						if x.Name.IsExported() {
							addTypes(x.Type)
						}
					case *ast.ValueSpec:
						if slices.ContainsFunc(x.Names, (*ast.Ident).IsExported) && x.Type != nil {
							addTypes(x.Type)
						}
					}
				}
			}
		}
	}
	return named
}

// typeNames returns the names in a type, without the types of unexported fields of a struct.
func typeNames(n ast.Node) (names []string) {
	ast.Inspect(n, func(n ast.Node) bool {
		switch x := n.(type) {
		case *ast.StructType:
			for _, f := range x.Fields.List {
				// An embedded field has no name. Its own fields and methods are exported with it.
				if len(f.Names) == 0 || slices.ContainsFunc(f.Names, (*ast.Ident).IsExported) {
					names = append(names, typeNames(f.Type)...)
				}
			}
			return false
		case *ast.SelectorExpr:
			return false
		case *ast.Ident:
			names = append(names, x.Name)
		}
		return true
	})
	return names
}
