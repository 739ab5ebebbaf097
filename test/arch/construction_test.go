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

// termPackages contain the parts of a term. Each part gets its collaborators when it is made: the order of a takeover is then the order
// of the code, and no part can be used before it is complete.
var termPackages = []string{
	"internal/relay/internal/changestream", "internal/relay/stored/divisions", "internal/relay/internal/fence", "internal/relay/internal/gap", "internal/relay/stored/lease", "internal/relay/internal/ledger", "internal/relay/stored/letters", "internal/base/mailbox",
	"internal/relay/stored/nodes", "internal/relay/stored/outboxes", "internal/relay/internal/pipeline", "internal/relay/stored/purge", "internal/relay/internal/reconciler", "internal/relay/stored/requeues",
	"internal/relay/internal/scheduled", "internal/relay/internal/sink", "internal/relay/internal/slots", "internal/relay/stored/sweep", "internal/relay/internal/term", "internal/relay/stored/waiting", "internal/relay/internal/watched", "internal/relay/internal/resolved",
}

// lateFields are the fields of parts that are set after their construction, with the reason.
var lateFields = map[string]string{
	"changestream.cursor.stopWatching":   "belongs to the wait for one response",
	"gap.Recovery.backoff":               "a state: the pause between two gaps begins with the first one",
	"sink.loop.abortDial":                "belongs to one attempt to connect",
	"sink.loop.link":                     "a state: the connection, which a loop opens again and again",
	"sink.Sink.cancelRun":                "belongs to one call of Run",
	"sink.loopSet.start":                 "belongs to one call of Run",
	"term.startPoint.unsavedDescription": "a value that is saved later",
}

// messages are values that parts pass on to each other, and fill on the way.
var messages = []string{"internal/relay/internal/ledger.Outcome", "internal/relay/internal/pipeline.Item"}

func TestPartsOfATermAreMadeComplete(t *testing.T) {
	t.Parallel()
	problems, late := constructionProblems(t, parseModule(t))

	for _, field := range late {
		if lateFields[field] == "" {
			continue
		}
		problems = slices.DeleteFunc(problems, func(p string) bool { return strings.Contains(p, " "+field+" ") })
	}

	for field, why := range lateFields {
		if why == "" || !slices.Contains(late, field) {
			t.Errorf("lateFields has %s, which has no reason or is not set late", field)
		}
	}
	reportProblems(t, problems)
}

func TestConstructionRuleSeesLateFields(t *testing.T) {
	t.Parallel()
	const other = "package gap\ntype Recovery struct { Pump pump; n int }\ntype pump interface { Run() }\n"
	for _, c := range []struct{ name, text, want string }{
		{"complete", "type T struct { r *gap.Recovery }\nfunc New() *T { return &T{r: &gap.Recovery{}} }", ""},
		{"set in its constructor", "type T struct { r *gap.Recovery }\nfunc New() *T { t := &T{}\n t.r = &gap.Recovery{}\n return t }", ""},
		{"removed", "type T struct { r *gap.Recovery }\nfunc (t *T) stop() { t.r = nil }", ""},
		{"a value", "type T struct { r *gap.Recovery }\nfunc (t *T) run() { t.r.n = 1 }", ""},
		{"in a method", "type T struct { r *gap.Recovery }\nfunc (t *T) takeOver() { t.r = &gap.Recovery{} }", "term.T.r is set"},
		{"with an error", "type T struct { r *gap.Recovery }\nfunc (t *T) open() (err error) { t.r, err = find(); return err }", "term.T.r is set"},
		{"of another part", "type T struct { r *gap.Recovery }\nfunc (t *T) takeOver() { t.r.Pump = nil\n t.r.Pump = t }", "gap.Recovery.Pump is set"},
		{"of a local part", "func f(p any) { r := find()\n r.Pump = p }\nfunc find() *gap.Recovery", "gap.Recovery.Pump is set"},
		{"a function", "type T struct { ended func() }\nfunc (t *T) SetEnd(f func()) { t.ended = f }", "term.T.ended is set"},
		{"an atomic function", "type T struct { ended atomic.Pointer[func()] }\nfunc (t *T) SetEnd(f func()) { t.ended.Store(&f) }", "term.T.ended is set"},
		{
			"after a closure", "type T struct { r *gap.Recovery }\nfunc New() *T { t := &T{}\n f := func() { t.r.Run() }\n t.r = &gap.Recovery{}\n return t }",
			"term.T.r is set",
		},
		{
			"while it is passed on", "type T struct { r *gap.Recovery }\nfunc New() *T { var t T\n t.r = use(&t)\n return &t }",
			"term.T.r is set",
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			head := fmt.Sprintf("package term\nimport %q\n", module+"/internal/relay/internal/gap")
			problems, _ := constructionProblems(t, []source{
				parseSource(t, "internal/relay/internal/gap/a.go", []byte(other)), parseSource(t, "internal/relay/internal/term/a.go", []byte(head+c.text)),
			})
			expectProblem(t, problems, c.want)
		})
	}
}

// constructionProblems returns the assignments that give a part of a term a collaborator after the part is made, and the names of the
// fields. It knows only what the syntax shows.
func constructionProblems(tb testing.TB, files []source) (problems, late []string) {
	tb.Helper()
	known := declarations{types: map[string]typed{}, results: map[string]typed{}}
	for _, s := range files {
		if !s.test && strings.HasPrefix(s.dir, "internal/") {
			known.add(s)
		}
	}

	for _, s := range files {
		if s.test || !slices.Contains(termPackages, s.dir) {
			continue
		}
		for _, d := range s.ast.Decls {
			f, ok := d.(*ast.FuncDecl)
			if !ok || f.Body == nil {
				continue
			}
			for _, l := range known.lateFieldsIn(s, f) {
				late = append(late, l.field)
				problems = append(problems, fmt.Sprintf("%s:%d: %s is set after its part was made", s.path, s.fset.Position(l.at).Line, l.field))
			}
		}
	}
	return problems, late
}

// typed is a type expression and the file that it is in.
type typed struct {
	expr ast.Expr
	in   source
}

// declarations has the types of the module by "dir.Name", and the first results of functions by "dir.Name" or "dir.Type.Name".
type declarations struct {
	types, results map[string]typed
}

func (k declarations) add(s source) {
	for _, d := range s.ast.Decls {
		switch d := d.(type) {
		case *ast.GenDecl:
			for _, spec := range d.Specs {
				if t, ok := spec.(*ast.TypeSpec); ok {
					k.types[s.dir+"."+t.Name.Name] = typed{t.Type, s}
				}
			}

		case *ast.FuncDecl:
			if d.Type.Results == nil {
				continue
			}

			name := s.dir + "." + d.Name.Name
			if d.Recv != nil {
				name = k.nameOf(typed{d.Recv.List[0].Type, s}) + "." + d.Name.Name
			}
			k.results[name] = typed{d.Type.Results.List[0].Type, s}
		}
	}
}

// nameOf returns the name of the type, without pointers, or "" if it is not a named type of the module.
func (k declarations) nameOf(d typed) string {
	switch e := d.expr.(type) {
	case *ast.StarExpr:
		return k.nameOf(typed{e.X, d.in})
	case *ast.IndexExpr:
		return k.nameOf(typed{e.X, d.in})

	case *ast.Ident:
		return d.in.dir + "." + e.Name
	case *ast.SelectorExpr:
		if pkg, ok := e.X.(*ast.Ident); ok {
			return dirOfImport(d.in, pkg.Name) + "." + e.Sel.Name
		}
	}
	return ""
}

// dirOfImport returns the directory of a package of the module that s imports under a name.
func dirOfImport(s source, name string) string {
	for _, i := range s.ast.Imports {
		p, ofModule := strings.CutPrefix(strings.Trim(i.Path.Value, `"`), module+"/")
		if ofModule && (i.Name == nil && path.Base(p) == name || i.Name != nil && i.Name.Name == name) {
			return p
		}
	}
	return "?" + name
}

// fieldOf returns the declaration of a field of the named type, also of an embedded one, and the type that has it.
func (k declarations) fieldOf(typeName, field string) (f typed, owner string) {
	t := k.types[typeName]
	body, ok := t.expr.(*ast.StructType)
	if !ok {
		return typed{}, ""
	}

	for _, l := range body.Fields.List {
		for _, n := range l.Names {
			if n.Name == field {
				return typed{l.Type, t.in}, typeName
			}
		}
	}

	for _, l := range body.Fields.List {
		if len(l.Names) > 0 {
			continue
		}

		embedded := k.nameOf(typed{l.Type, t.in})
		if path.Ext(embedded) == "."+field {
			return typed{l.Type, t.in}, typeName
		}
		if f, owner := k.fieldOf(embedded, field); owner != "" {
			return f, owner
		}
	}
	return typed{}, ""
}

// isCollaborator reports whether a value of the type does work for its owner: a function, an interface of the module, or a pointer to a
// type of another package of the module.
func (k declarations) isCollaborator(d typed) bool {
	switch e := d.expr.(type) {
	case *ast.FuncType, *ast.InterfaceType:
		return true
	case *ast.StarExpr:
		name := k.nameOf(typed{e.X, d.in})
		_, known := k.types[name]
		return known && !strings.HasPrefix(name, d.in.dir+".")
	case *ast.IndexExpr:
		// atomic.Pointer[func()]
		_, f := e.Index.(*ast.FuncType)
		return f
	}

	switch k.types[k.nameOf(d)].expr.(type) {
	case *ast.FuncType, *ast.InterfaceType:
		return true
	}
	return false
}

// lateField is an assignment to a field of a part that was made before.
type lateField struct {
	field string
	at    token.Pos
}

// lateFieldsIn returns the late assignments in a function.
func (k declarations) lateFieldsIn(s source, f *ast.FuncDecl) (late []lateField) {
	vars := map[string]typed{} // types of variables
	for _, l := range []*ast.FieldList{f.Recv, f.Type.Params} {
		if l == nil {
			continue
		}
		for _, p := range l.List {
			for _, n := range p.Names {
				vars[n.Name] = typed{p.Type, s}
			}
		}
	}

	// The variables that this function makes.
	made := map[string]bool{}

	check := func(target ast.Expr, stmt ast.Stmt) {
		sel, ok := target.(*ast.SelectorExpr)
		if !ok {
			return
		}
		field, owner := k.fieldOf(k.nameOf(k.typeOf(sel.X, vars, s)), sel.Sel.Name)
		if owner == "" || !k.isCollaborator(field) || slices.Contains(messages, owner) {
			return
		}
		// The field of a copy is not that of a part, and a part that is not in use may still be made.
		if root := k.rootOf(sel.X, vars, s); root != "" {
			_, pointer := vars[root].expr.(*ast.StarExpr)
			if made[root] && !k.isUsedBefore(f, root, vars[root], stmt) || !made[root] && !pointer {
				return
			}
		}
		late = append(late, lateField{path.Base(owner[:strings.LastIndex(owner, ".")]) + path.Ext(owner) + "." + sel.Sel.Name, target.Pos()})
	}
	ast.Inspect(f.Body, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.DeclStmt:
			for _, spec := range n.Decl.(*ast.GenDecl).Specs {
				if v, ok := spec.(*ast.ValueSpec); ok && v.Type != nil {
					for _, name := range v.Names {
						_, pointer := v.Type.(*ast.StarExpr)
						vars[name.Name], made[name.Name] = typed{v.Type, s}, !pointer
					}
				}
			}
		case *ast.AssignStmt:
			for i, l := range n.Lhs {
				if x, ok := l.(*ast.Ident); ok && n.Tok == token.DEFINE && (len(n.Lhs) == len(n.Rhs) || i == 0) {
					vars[x.Name], made[x.Name] = k.typeOf(n.Rhs[i], vars, s), isLiteral(n.Rhs[i])
				}
				if len(n.Lhs) == len(n.Rhs) {
					if x, ok := n.Rhs[i].(*ast.Ident); ok && x.Name == "nil" {
						continue
					}
				}
				check(l, n)
			}
		case *ast.ExprStmt:
			// x.f.Store(&p)
			call, ok := n.X.(*ast.CallExpr)
			if !ok {
				break
			}
			if store, ok := call.Fun.(*ast.SelectorExpr); ok && store.Sel.Name == "Store" {
				check(store.X, n)
			}
		}
		return true
	})
	return late
}

// rootOf returns the variable that contains the struct e, or refers to it, without another pointer in between. It returns "" if there is
// none.
func (k declarations) rootOf(e ast.Expr, vars map[string]typed, s source) string {
	switch e := e.(type) {
	case *ast.Ident:
		return e.Name
	case *ast.SelectorExpr:
		if _, pointer := k.typeOf(e, vars, s).expr.(*ast.StarExpr); !pointer {
			return k.rootOf(e.X, vars, s)
		}
	}
	return ""
}

// isLiteral reports whether e makes a struct.
func isLiteral(e ast.Expr) bool {
	if u, ok := e.(*ast.UnaryExpr); ok && u.Op == token.AND {
		e = u.X
	}
	_, ok := e.(*ast.CompositeLit)
	return ok
}

// typeOf returns the type of e as far as the syntax shows it.
func (k declarations) typeOf(e ast.Expr, vars map[string]typed, s source) typed {
	switch e := e.(type) {
	case *ast.Ident:
		return vars[e.Name]
	case *ast.UnaryExpr:
		return k.typeOf(e.X, vars, s)
	case *ast.StarExpr:
		d := k.typeOf(e.X, vars, s)
		if p, ok := d.expr.(*ast.StarExpr); ok {
			d.expr = p.X
		}
		return d

	case *ast.ParenExpr:
		return k.typeOf(e.X, vars, s)
	case *ast.CompositeLit:
		return typed{e.Type, s}
	case *ast.SelectorExpr:
		f, _ := k.fieldOf(k.nameOf(k.typeOf(e.X, vars, s)), e.Sel.Name)
		return f

	case *ast.CallExpr:
		switch fun := e.Fun.(type) {
		case *ast.Ident:
			return k.results[s.dir+"."+fun.Name]
		case *ast.SelectorExpr:
			if pkg, ok := fun.X.(*ast.Ident); ok && vars[pkg.Name].expr == nil {
				return k.results[dirOfImport(s, pkg.Name)+"."+fun.Sel.Name]
			}
			return k.results[k.nameOf(k.typeOf(fun.X, vars, s))+"."+fun.Sel.Name]
		}
	}
	return typed{}
}

// isUsedBefore reports whether the function uses the variable as a whole before the end of stmt: it passes it on, calls a method of it,
// or refers to it in a closure.
func (k declarations) isUsedBefore(f *ast.FuncDecl, name string, of typed, stmt ast.Stmt) (used bool) {
	var look func(n ast.Node) bool
	look = func(n ast.Node) bool {
		if n == nil || used || n.Pos() >= stmt.End() {
			return false
		}
		switch n := n.(type) {
		case *ast.SelectorExpr:
			if x, ok := n.X.(*ast.Ident); ok && x.Name == name {
				_, owner := k.fieldOf(k.nameOf(of), n.Sel.Name)
				used = used || owner == "" || inClosure(f, n.Pos())
				return false
			}
		case *ast.KeyValueExpr:
			// A key is a field, not a variable.
			ast.Inspect(n.Value, look)
			return false
		case *ast.AssignStmt:
			// The definition of the variable is no use.
			if x, ok := n.Lhs[0].(*ast.Ident); ok && x.Name == name && n.Tok == token.DEFINE {
				return false
			}
		case *ast.ValueSpec:
			return false
		case *ast.Ident:
			used = used || n.Name == name
		}
		return true
	}
	ast.Inspect(f.Body, look)
	return used
}

// inClosure reports whether the place is in a function literal of f.
func inClosure(f *ast.FuncDecl, at token.Pos) (found bool) {
	ast.Inspect(f.Body, func(n ast.Node) bool {
		l, ok := n.(*ast.FuncLit)
		found = found || ok && l.Pos() <= at && at < l.End()
		return true
	})
	return found
}
