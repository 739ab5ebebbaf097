// Package readable measures how readable the code is, in figures that can be compared with other projects and between two
// versions. test/measure prints them, and test/arch keeps them within bounds.
//
// The figures are a thermometer. Squeezing code until a figure is met (blank lines without a thought between them, one function
// cut into five, longer names that say no more) makes the code worse and the figure worthless.
package readable

import (
	"bytes"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"unicode"
)

const (
	longFunction   = 15 // lines, with the signature and the closing brace
	mostDefined    = 8  // definitions of one unexported name
	mostMethods    = 60
	mostFields     = 26
	longLine       = 120
	printedRepeats = 6
	reasonWords    = 5 // a trailing comment of so many words, without //, may be a reason
)

// unclear are words that make a sentence hard to read once, by the writing guide: clauses that begin with "what" used as nouns,
// components that speak, pronouns without a noun, and old-fashioned adverbs.
var unclear = regexp.MustCompile(`(?i)\b(what (is|are|was|were|has|have|it|they|others?|an?|the|comes|stands|waits|goes|no)\b|` +
	`(tells?|told|hears?|heard|says?|said|knows?|knew|asks?|asked) |(that|this|the|each) one\b|those (that|of|who|with|which)\b|` +
	`whoever|whatever|nobody|anew|meanwhile|for ever\b|of its own|of their own|by itself|beside\b|besides\b|mends?\b|mended|borne|spares? )`)

// Measure adds up files. Its methods may be called by one goroutine at a time.
type Measure struct {
	files, lines, code, wideLines, trailing int
	trailingReasons                         int // trailing comments of five words and more inside functions
	packages                                map[string]bool
	lengths                                 []int // of functions
	inside, insideComments                  int   // lines of functions, and comment lines among them
	long, withoutParagraph                  int
	names, oneWord                          int
	unexported, unexportedOneWord           int
	defined                                 map[string]int  // unexported functions and methods, by directory and name
	required                                map[string]bool // methods of interfaces, by directory and name
	methods, fields                         map[string]int  // by type
	funcFields, interfaces                  int
	locals, oneLetterLocals                 int
	parameters, oneLetterParameters         int
	wordParameters                          int // parameters that are English function words
	commentWords, unclearWords              int
	unclearTexts                            int             // wordings in string literals
	functions                               map[string]bool // names of all that can be called
	bareCalls                               []bareCall
	places                                  []string
}

// New returns a Measure of no files.
func New() *Measure {
	return &Measure{
		packages: map[string]bool{}, defined: map[string]int{}, required: map[string]bool{},
		methods: map[string]int{}, fields: map[string]int{}, functions: map[string]bool{},
	}
}

// AddTree adds the Go files below dir: the product's, or the tests'.
func (m *Measure) AddTree(dir string, tests bool) error {
	return filepath.WalkDir(dir, func(path string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if entry.IsDir() && (entry.Name() == "testdata" || entry.Name() == "node_modules") {
			return filepath.SkipDir
		}
		if entry.IsDir() || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") != tests {
			return nil
		}
		return m.addFile(path)
	})
}

// addFile adds one file. A file that does not parse is an error.
func (m *Measure) addFile(path string) error {
	text, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	fset := token.NewFileSet()
	file, err := parser.ParseFile(fset, path, text, parser.ParseComments|parser.SkipObjectResolution)
	if err != nil {
		return err
	}

	lines := bytes.Split(bytes.TrimSuffix(text, []byte("\n")), []byte("\n"))
	commentLine := make([]bool, len(lines)+1) // from 1: the line holds nothing but a comment
	for _, group := range file.Comments {
		m.addComment(path, fset, group)
		for _, c := range group.List {
			first, last := fset.Position(c.Pos()), fset.Position(c.End())
			if len(bytes.TrimSpace(lines[first.Line-1][:first.Column-1])) > 0 {
				m.trailing++
				m.addTrailing(path, file, c, first.Line)
				continue
			}
			for i := first.Line; i <= last.Line; i++ {
				commentLine[i] = true
			}
		}
	}

	m.files++
	m.lines += len(lines)
	m.packages[filepath.Dir(path)] = true
	for i, line := range lines {
		if len(bytes.TrimSpace(line)) > 0 && !commentLine[i+1] {
			m.code++
		}
		if len(bytes.ReplaceAll(line, []byte("\t"), []byte("    "))) > longLine {
			m.wideLines++
		}
	}
	m.addTexts(path, fset, file)
	m.addCalls(path, fset, file)
	for _, decl := range file.Decls {
		switch typed := decl.(type) {
		case *ast.FuncDecl:
			m.addFunction(path, fset, typed, lines, commentLine)
		case *ast.GenDecl:
			m.addTypes(path, typed)
		}
	}
	return nil
}

// addComment counts the words of a comment, and those that the writing guide rules out.
func (m *Measure) addComment(path string, fset *token.FileSet, group *ast.CommentGroup) {
	text := group.Text()
	m.commentWords += len(strings.Fields(text))
	text = strings.Join(strings.Fields(text), " ")
	for _, found := range unclear.FindAllString(text, -1) {
		m.unclearWords++
		m.places = append(m.places, fmt.Sprintf("%s:%d: wording: %q", path, fset.Position(group.Pos()).Line, strings.TrimSpace(found)))
	}
}

// addTrailing counts a comment at the end of a line inside a function if it is long enough to be a reason: reasons stand above
// the step.
func (m *Measure) addTrailing(path string, file *ast.File, comment *ast.Comment, line int) {
	// A directive for a linter stands at the end of its line.
	if len(strings.Fields(comment.Text)) <= reasonWords || strings.HasPrefix(comment.Text, "//nolint") {
		return
	}
	for _, decl := range file.Decls {
		if fn, ok := decl.(*ast.FuncDecl); ok && fn.Body != nil && fn.Body.Pos() < comment.Pos() && comment.Pos() < fn.Body.End() {
			m.trailingReasons++
			m.places = append(m.places, fmt.Sprintf("%s:%d: reason at the end of a line: %s", path, line, comment.Text))
		}
	}
}

// addTexts counts the wordings that the writing guide rules out in string literals: errors, logs, help, and the tags that
// document the API. A literal without a space is an identifier.
func (m *Measure) addTexts(path string, fset *token.FileSet, file *ast.File) {
	ast.Inspect(file, func(n ast.Node) bool {
		lit, ok := n.(*ast.BasicLit)
		if !ok || lit.Kind != token.STRING || !strings.Contains(lit.Value, " ") {
			return true
		}
		for _, found := range unclear.FindAllString(strings.Join(strings.Fields(lit.Value), " "), -1) {
			m.unclearTexts++
			m.places = append(m.places, fmt.Sprintf("%s:%d: text: %q", path, fset.Position(lit.Pos()).Line, strings.TrimSpace(found)))
		}
		return true
	})
}

// bareCall is a call with true or false among several arguments.
type bareCall struct{ name, place string }

// dataCalls are functions that take true and false as data, such as an operand of MongoDB: there the word is the clearest text.
// A name of the standard library is in the list if the module declares the same name.
var dataCalls = []string{"IfNull", "op", "Exists", "Contains", "Schema", "assertEqual"}

// addCalls collects the calls with a bare boolean, and the names of the functions, methods and variables that can be called. Types
// are unknown, so a call of another module's function of the same name counts as well.
func (m *Measure) addCalls(path string, fset *token.FileSet, file *ast.File) {
	ast.Inspect(file, func(node ast.Node) bool {
		switch n := node.(type) {
		case *ast.FuncDecl:
			m.functions[n.Name.Name] = true
		case *ast.Field:
			if _, ok := n.Type.(*ast.FuncType); ok {
				for _, name := range n.Names {
					m.functions[name.Name] = true
				}
			}
		case *ast.AssignStmt:
			for i, value := range n.Rhs {
				name, ok := n.Lhs[i].(*ast.Ident)
				if _, isFunc := value.(*ast.FuncLit); ok && isFunc {
					m.functions[name.Name] = true
				}
			}
		case *ast.CallExpr:
			if len(n.Args) > 1 && slices.ContainsFunc(n.Args, isBoolean) {
				name := calleeOf(n.Fun)
				place := fmt.Sprintf("%s:%d: bare boolean argument: %s", path, fset.Position(n.Pos()).Line, name)
				m.bareCalls = append(m.bareCalls, bareCall{name, place})
			}
		}
		return true
	})
}

// isBoolean reports whether an argument is the word true or false.
func isBoolean(expr ast.Expr) bool {
	ident, ok := expr.(*ast.Ident)
	return ok && (ident.Name == "true" || ident.Name == "false")
}

// calleeOf returns the name of a called function without its package, receiver and type arguments.
func calleeOf(expr ast.Expr) string {
	switch typed := expr.(type) {
	case *ast.Ident:
		return typed.Name
	case *ast.SelectorExpr:
		return typed.Sel.Name
	case *ast.IndexExpr:
		return calleeOf(typed.X)
	case *ast.IndexListExpr:
		return calleeOf(typed.X)
	}
	return ""
}

// BareBooleans returns the places of the calls of functions of the files with true or false among several arguments: such a call
// cannot be read without the declaration. It leaves out functions that take booleans as data.
func (m *Measure) BareBooleans() (places []string) {
	for _, call := range m.bareCalls {
		if m.functions[call.name] && !slices.Contains(dataCalls, call.name) {
			places = append(places, call.place)
		}
	}
	return places
}

// addFunction counts the lines, paragraphs and comments of a function, and its name.
func (m *Measure) addFunction(path string, fset *token.FileSet, decl *ast.FuncDecl, lines [][]byte, commentLine []bool) {
	first, last := fset.Position(decl.Pos()).Line, fset.Position(decl.End()).Line
	length := last - first + 1
	m.lengths = append(m.lengths, length)
	m.inside += length
	blank := false
	for i := first + 1; i < last; i++ {
		if commentLine[i] {
			m.insideComments++
		}
		blank = blank || len(bytes.TrimSpace(lines[i-1])) == 0
	}
	if length >= longFunction {
		m.long++
		if !blank {
			m.withoutParagraph++
			m.places = append(m.places, fmt.Sprintf("%s:%d: no paragraph: %s has %d lines", path, first, decl.Name.Name, length))
		}
	}

	m.addVariables(path, fset, decl)
	name := decl.Name.Name
	if decl.Recv != nil && len(decl.Recv.List) == 1 {
		m.methods[filepath.Dir(path)+"."+receiver(decl.Recv.List[0].Type)]++
	}
	if name == "main" || name == "init" || name == "_" {
		return
	}
	m.names++
	single := !strings.ContainsFunc(name[1:], func(char rune) bool { return unicode.IsUpper(char) || char == '_' })
	if single {
		m.oneWord++
	}
	if !ast.IsExported(name) {
		m.unexported++
		m.defined[filepath.Dir(path)+"."+name]++
		if single {
			m.unexportedOneWord++
			m.places = append(m.places, fmt.Sprintf("%s:%d: one word: %s", path, first, name))
		}
	}
}

// usualNames are variables that no figure counts: indices, counts, and results that every function has.
var usualNames = []string{"_", "i", "j", "n", "ok", "err"}

// functionWords are parameters that make a sentence about them ambiguous: "stores by, with the time of the server".
var functionWords = []string{"by", "here", "at", "it", "to", "each", "of", "on", "up", "with"}

// addVariables counts the parameters and results of a function and of the functions in it, and its local variables without those of
// loops. A receiver is no parameter.
func (m *Measure) addVariables(path string, fset *token.FileSet, decl *ast.FuncDecl) {
	count := func(all, oneLetter *int, what string, names ...ast.Expr) {
		for _, name := range names {
			ident, ok := name.(*ast.Ident)
			if !ok || slices.Contains(usualNames, ident.Name) {
				continue
			}
			*all++
			if len(ident.Name) == 1 {
				*oneLetter++
				m.places = append(m.places, fmt.Sprintf("%s:%d: one letter: %s %s", path, fset.Position(ident.Pos()).Line, what, ident.Name))
			}
		}
	}
	countLocals := func(names ...ast.Expr) { count(&m.locals, &m.oneLetterLocals, "local", names...) }

	loops := map[ast.Stmt]bool{} // the first statements of loops
	ast.Inspect(decl, func(node ast.Node) bool {
		switch n := node.(type) {
		case *ast.FuncType:
			for _, list := range []*ast.FieldList{n.Params, n.Results} {
				for _, field := range fieldsOf(list) {
					if isOfTesting(field.Type) {
						continue // t and b
					}
					for _, name := range field.Names {
						count(&m.parameters, &m.oneLetterParameters, "parameter", name)
						if slices.Contains(functionWords, name.Name) {
							m.wordParameters++
							m.places = append(m.places, fmt.Sprintf("%s:%d: parameter is a function word: %s", path, fset.Position(name.Pos()).Line, name.Name))
						}
					}
				}
			}
		case *ast.ForStmt:
			loops[n.Init] = true
		case *ast.AssignStmt:
			if n.Tok == token.DEFINE && !loops[n] {
				countLocals(n.Lhs...)
			}
		case *ast.ValueSpec:
			for _, name := range n.Names {
				countLocals(name)
			}
		}
		return true
	})
}

// isOfTesting reports whether a type is one of package testing, such as *testing.T.
func isOfTesting(expr ast.Expr) bool {
	if star, ok := expr.(*ast.StarExpr); ok {
		expr = star.X
	}
	selector, ok := expr.(*ast.SelectorExpr)
	if !ok {
		return false
	}
	pkg, ok := selector.X.(*ast.Ident)
	return ok && pkg.Name == "testing"
}

// fieldsOf returns the fields of a list that may be missing.
func fieldsOf(list *ast.FieldList) []*ast.Field {
	if list == nil {
		return nil
	}
	return list.List
}

// receiver returns the name of a receiver's type.
func receiver(expr ast.Expr) string {
	for {
		switch typed := expr.(type) {
		case *ast.StarExpr:
			expr = typed.X
		case *ast.IndexExpr:
			expr = typed.X
		case *ast.IndexListExpr:
			expr = typed.X
		case *ast.Ident:
			return typed.Name
		default:
			return "?"
		}
	}
}

// addTypes counts the fields of the types that decl declares.
func (m *Measure) addTypes(path string, decl *ast.GenDecl) {
	for _, spec := range decl.Specs {
		typeSpec, ok := spec.(*ast.TypeSpec)
		if !ok {
			continue
		}
		switch typed := typeSpec.Type.(type) {
		case *ast.InterfaceType:
			m.interfaces++
			for _, method := range typed.Methods.List {
				for _, name := range method.Names {
					m.required[filepath.Dir(path)+"."+name.Name] = true
				}
			}
		case *ast.StructType:
			for _, field := range typed.Fields.List {
				m.fields[filepath.Dir(path)+"."+typeSpec.Name.Name] += max(1, len(field.Names))
				if _, ok := field.Type.(*ast.FuncType); ok {
					m.funcFields += max(1, len(field.Names))
				}
			}
		}
	}
}

// OneLetterLocals returns the share of local variables with a name of one letter, in percent.
func (m *Measure) OneLetterLocals() float64 { return percent(m.oneLetterLocals, m.locals) }

// OneLetterParameters returns the share of parameters and results with a name of one letter, in percent.
func (m *Measure) OneLetterParameters() float64 { return percent(m.oneLetterParameters, m.parameters) }

// WordParameters returns the number of parameters and results that are English function words.
func (m *Measure) WordParameters() int { return m.wordParameters }

// Places returns each place that counts against a figure, sorted: long functions without a paragraph, one-word names, one-letter variables, parameters that are function words, bare boolean arguments, names
// that are defined too often, large types, and comments with words that the writing guide in CONTRIBUTING.md rules out.
func (m *Measure) Places() []string {
	places := append(slices.Clone(m.places), m.BareBooleans()...)
	for name, n := range m.Defined() {
		if n > mostDefined {
			places = append(places, fmt.Sprintf("name: %s is defined %d times", name, n))
		}
	}
	for name, n := range m.methods {
		if n > mostMethods {
			places = append(places, fmt.Sprintf("type: %s has %d methods", name, n))
		}
	}
	for name, n := range m.fields {
		if n > mostFields {
			places = append(places, fmt.Sprintf("type: %s has %d fields", name, n))
		}
	}
	slices.Sort(places)
	return places
}

// WithoutParagraph returns the share of functions of 15 lines and more that have no blank line, in percent.
func (m *Measure) WithoutParagraph() float64 { return percent(m.withoutParagraph, m.long) }

// OneWord returns the share of unexported function names that are one word, in percent.
func (m *Measure) OneWord() float64 { return percent(m.unexportedOneWord, m.unexported) }

// Unclear returns the unclear wordings per 1,000 words of comment.
func (m *Measure) Unclear() float64 { return 10 * percent(m.unclearWords, m.commentWords) }

// UnclearTexts returns the number of unclear wordings in string literals.
func (m *Measure) UnclearTexts() int { return m.unclearTexts }

// Methods returns the number of methods of each type, by directory and name.
func (m *Measure) Methods() map[string]int { return m.methods }

// Fields is like Methods.
func (m *Measure) Fields() map[string]int { return m.fields }

// Defined returns how often each unexported function name is defined. It does not count methods of an interface of their
// package: implementations have no choice of the name.
func (m *Measure) Defined() map[string]int {
	counts := map[string]int{}
	for place, n := range m.defined {
		if !m.required[place] {
			counts[place[strings.LastIndexByte(place, '.')+1:]] += n
		}
	}
	return counts
}

// TrailingReasons returns the number of comments of more than five words at the ends of lines inside functions.
func (m *Measure) TrailingReasons() int { return m.trailingReasons }

// Print writes a line for each figure.
func (m *Measure) Print(out io.Writer) {
	slices.Sort(m.lengths)
	quantile := func(fraction float64) int {
		if len(m.lengths) == 0 {
			return 0
		}
		return m.lengths[int(fraction*float64(len(m.lengths)-1))]
	}
	row := func(name, format string, values ...any) {
		fmt.Fprintf(out, "%-52s "+format+"\n", append([]any{name}, values...)...)
	}

	row("lines, code lines, files, packages", "%d, %d, %d, %d", m.lines, m.code, m.files, len(m.packages))
	row("functions; median, p99, longest", "%d; %d, %d, %d", len(m.lengths), quantile(0.5), quantile(0.99), quantile(1))
	row("functions of 15 lines or more without a blank line", "%.1f %% (%d of %d)", percent(m.withoutParagraph, m.long), m.withoutParagraph, m.long)
	row("comment lines per 100 lines inside functions", "%.1f", percent(m.insideComments, m.inside))
	row("trailing comments per 100 code lines; reasons", "%.1f; %d", percent(m.trailing, m.code), m.trailingReasons)
	row("one-word function names, all; unexported", "%.1f %%; %.1f %%", percent(m.oneWord, m.names), percent(m.unexportedOneWord, m.unexported))
	row("one-letter locals; parameters (without i j n ok err)", "%.1f %%; %.1f %%", m.OneLetterLocals(), m.OneLetterParameters())
	row("parameters that are English function words", "%d", m.wordParameters)
	row("bare boolean arguments", "%d", len(m.BareBooleans()))
	row("most defined unexported names", "%s", top(m.Defined(), printedRepeats))
	row("types with the most methods", "%s", top(m.methods, 3))
	row("types with the most fields", "%s", top(m.fields, 3))
	row("interfaces; function-typed fields per 1,000 code lines", "%d; %.1f", m.interfaces, 10*percent(m.funcFields, m.code))
	row("lines over 120 characters", "%.1f %%", percent(m.wideLines, m.lines))
	row("unclear wordings per 1,000 words of comment", "%.1f", 10*percent(m.unclearWords, m.commentWords))
	row("unclear wordings in string literals", "%d", m.unclearTexts)
}

func percent(part, whole int) float64 {
	if whole == 0 {
		return 0
	}
	return 100 * float64(part) / float64(whole)
}

// top lists the n names with the largest counts.
func top(counts map[string]int, n int) string {
	var names []string
	for name := range counts {
		names = append(names, name)
	}
	slices.SortFunc(names, func(a, b string) int {
		if counts[a] != counts[b] {
			return counts[b] - counts[a]
		}
		return strings.Compare(a, b)
	})

	var texts []string
	for _, name := range names[:min(n, len(names))] {
		texts = append(texts, fmt.Sprintf("%s %d", name, counts[name]))
	}
	return strings.Join(texts, ", ")
}
