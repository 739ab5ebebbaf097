package main

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io"
	"io/fs"
	"maps"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

// house has the figures about the structure of the module: its files without tests.
type house struct {
	without  []string // directories that are not counted as product
	module   string
	packages map[string]bool
	arrows   map[[2]string]bool // imports between packages of internal/, from and to
	public   map[[2]string]bool // imports of public packages by packages of internal/
	lines    int

	interfaces map[string]map[string]string // name to method name to shape
	types      map[string]map[string]string
}

// measureHouse reads the Go files of cmd, internal, pkg and resume below root. The directories in without count as tools.
func measureHouse(root string, without []string) (*house, error) {
	house := &house{
		without: without, packages: map[string]bool{}, arrows: map[[2]string]bool{}, public: map[[2]string]bool{},
		interfaces: map[string]map[string]string{}, types: map[string]map[string]string{},
	}
	text, err := os.ReadFile(filepath.Join(root, "go.mod"))
	if err != nil {
		return nil, err
	}
	house.module = strings.TrimPrefix(strings.SplitN(string(text), "\n", 2)[0], "module ")

	for _, tree := range []string{"cmd", "internal", "pkg", "resume"} {
		err := filepath.WalkDir(filepath.Join(root, tree), func(file string, entry fs.DirEntry, err error) error {
			switch {
			case err != nil:
				return err
			case entry.IsDir() && entry.Name() == "testdata":
				return filepath.SkipDir
			case entry.IsDir() || !strings.HasSuffix(file, ".go") || strings.HasSuffix(file, "_test.go"):
				return nil
			}
			rel, err := filepath.Rel(root, file)
			if err != nil {
				return err
			}
			return house.addFile(file, filepath.ToSlash(rel))
		})
		if err != nil {
			return nil, err
		}
	}
	return house, nil
}

func (h *house) addFile(file, rel string) error {
	text, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	f, err := parser.ParseFile(token.NewFileSet(), file, text, parser.SkipObjectResolution)
	if err != nil {
		return err
	}

	dir := path.Dir(rel)
	isTool := slices.ContainsFunc(h.without, func(d string) bool { return dir == d || strings.HasPrefix(dir, d+"/") })
	if !isTool {
		h.lines += strings.Count(string(text), "\n")
	}
	if strings.HasPrefix(dir, "internal/") {
		h.packages[dir] = true
		h.addImports(f, dir, isTool)
	}
	for _, d := range f.Decls {
		h.addDeclaration(d, dir, isTool)
	}
	return nil
}

func (h *house) addImports(file *ast.File, dir string, isTool bool) {
	for _, i := range file.Imports {
		pattern, err := strconv.Unquote(i.Path.Value)
		target, inside := strings.CutPrefix(pattern, h.module+"/")
		switch {
		case err != nil || !inside:
		case strings.HasPrefix(target, "internal/"):
			h.arrows[[2]string{dir, target}] = true
		case strings.HasPrefix(target, "pkg/") && !isTool:
			h.public[[2]string{dir, target}] = true
		}
	}
}

// addDeclaration collects the interfaces with two and more methods of the product, and the methods of all types.
func (h *house) addDeclaration(decl ast.Decl, dir string, isTool bool) {
	switch typed := decl.(type) {
	case *ast.FuncDecl:
		if typed.Recv == nil {
			return
		}
		if name := receiverName(typed.Recv.List[0].Type); name != "" {
			addTo(h.types, dir+"."+name, typed.Name.Name, shapeOf(typed.Type))
		}
	case *ast.GenDecl:
		for _, s := range typed.Specs {
			spec, ok := s.(*ast.TypeSpec)
			if !ok || isTool {
				continue
			}
			i, ok := spec.Type.(*ast.InterfaceType)
			if !ok {
				continue
			}
			methods := map[string]string{}
			for _, m := range i.Methods.List {
				if fun, ok := m.Type.(*ast.FuncType); ok && len(m.Names) == 1 {
					methods[m.Names[0].Name] = shapeOf(fun)
				}
			}
			if len(methods) > 1 {
				h.interfaces[dir+"."+spec.Name.Name] = methods
			}
		}
	}
}

func addTo(set map[string]map[string]string, name, method, shape string) {
	if set[name] == nil {
		set[name] = map[string]string{}
	}
	set[name][method] = shape
}

func receiverName(expr ast.Expr) string {
	switch typed := expr.(type) {
	case *ast.StarExpr:
		return receiverName(typed.X)
	case *ast.IndexExpr:
		return receiverName(typed.X)
	case *ast.IndexListExpr:
		return receiverName(typed.X)
	case *ast.Ident:
		return typed.Name
	}
	return ""
}

// shapeOf returns the numbers of parameters and results.
func shapeOf(funcType *ast.FuncType) string {
	return fmt.Sprint(funcType.Params.NumFields(), " ", funcType.Results.NumFields())
}

// single returns the interfaces that exactly one type of the module implements, as far as names and numbers of parameters show it. Embedded
// interfaces and structs are not followed.
func (h *house) single() []string {
	var out []string
	for _, name := range slices.Sorted(maps.Keys(h.interfaces)) {
		fits := 0
		for _, methods := range h.types {
			missing := false
			for m, shape := range h.interfaces[name] {
				missing = missing || methods[m] != shape
			}
			if !missing {
				fits++
			}
		}
		if fits == 1 {
			out = append(out, name)
		}
	}
	return out
}

// rooms returns the directories directly below internal/.
func (h *house) rooms() map[string]bool {
	out := map[string]bool{}
	for p := range h.packages {
		out[strings.Split(p, "/")[1]] = true
	}
	return out
}

func (h *house) print(out io.Writer) {
	roomArrows := map[[2]string]bool{}
	for a := range h.arrows {
		from, to := strings.Split(a[0], "/")[1], strings.Split(a[1], "/")[1]
		if from != to {
			roomArrows[[2]string{from, to}] = true
		}
	}
	for _, f := range []struct {
		name string
		n    int
	}{
		{"directories in internal/", len(h.rooms())},
		{"packages below internal/", len(h.packages)},
		{"imports between these packages", len(h.arrows)},
		{"imports between the directories", len(roomArrows)},
		{"imports of public packages, without tools", len(h.public)},
		{"lines of Go without tests and tools", h.lines},
		{"interfaces with one implementation", len(h.single())},
	} {
		fmt.Fprintf(out, "%-52s %d\n", f.name, f.n)
	}
}
