package arch

import (
	"bytes"
	"fmt"
	"go/ast"
	"go/constant"
	"go/parser"
	"go/printer"
	"go/token"
	"go/types"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"
)

// TestDefaultsAreDocumentedWithTheirReasons: a developer who decides about an option has to see the value and why it is the
// default (CONTRIBUTING.md, Public packages). Each constant default… occurs in a comment about a default, and each option with
// a number or a time gives a reason.
func TestDefaultsAreDocumentedWithTheirReasons(t *testing.T) {
	t.Parallel()
	constants, options := 0, 0
	for _, dir := range publicPackages(t) {
		set := token.NewFileSet()
		files := parseDir(t, set, dir, false, parser.ParseComments)
		comments := commentsAboutDefaults(files)

		for name, spellings := range defaultsOf(t, set, files) {
			constants++
			isNamed := func(comment string) bool { return containsWord(comment, spellings) }
			if !slices.ContainsFunc(comments, isNamed) {
				t.Errorf("%s: no comment about a default names the value of %s: one of %q", dir, name, spellings)
			}
		}
		for name, comment := range optionsWithDefaults(files) {
			options++
			if !reasonOfDefault.MatchString(comment) {
				t.Errorf("%s: the comment of %s gives no reason for the default: %s", dir, name, comment)
			}
		}
	}
	if constants < 10 || options < 20 {
		t.Errorf("only %d constants and %d options were found", constants, options)
	}
}

// reasonOfDefault matches "Defaults to" with a value, and the words that begin a reason.
var reasonOfDefault = regexp.MustCompile(`Defaults? to .{1,80}?(: |, (which|because|so that|as long as|the default of) |, the default )`)

// joinLines returns the text of a comment on one line.
func joinLines(c *ast.CommentGroup) string { return strings.Join(strings.Fields(c.Text()), " ") }

// commentsAboutDefaults returns the comments that name a default.
func commentsAboutDefaults(files []*ast.File) (found []string) {
	for _, f := range files {
		for _, c := range f.Comments {
			if text := joinLines(c); regexp.MustCompile(`\b[Dd]efaults?\b|threshold of 0`).MatchString(text) {
				found = append(found, text)
			}
		}
	}
	return found
}

// containsWord reports whether text contains one of the spellings as a whole.
func containsWord(text string, spellings []string) bool {
	for _, s := range spellings {
		if regexp.MustCompile(`(^|[\s("])` + regexp.QuoteMeta(s) + `($|[\s.,:;")])`).MatchString(text) {
			return true
		}
	}
	return false
}

// optionsWithDefaults returns the comments of the options that take a number or a time and have a default.
func optionsWithDefaults(files []*ast.File) map[string]string {
	found := map[string]string{}
	for _, f := range files {
		for _, decl := range f.Decls {
			fn, ok := decl.(*ast.FuncDecl)
			if !ok || fn.Doc == nil || !strings.HasPrefix(fn.Name.Name, "With") || len(fn.Type.Params.List) != 1 {
				continue
			}

			param := types.ExprString(fn.Type.Params.List[0].Type)
			comment := joinLines(fn.Doc)
			if slices.Contains([]string{"int", "int64", "float64", "time.Duration"}, param) && strings.Contains(comment, "Defaults to") {
				found[fn.Name.Name] = comment
			}
		}
	}
	return found
}

// defaultsOf returns the constants of a package whose names begin with "default", with the spellings of their values.
// It leaves out constants of other packages.
func defaultsOf(t *testing.T, set *token.FileSet, files []*ast.File) map[string][]string {
	t.Helper()
	found := map[string][]string{}
	for _, f := range files {
		for _, decl := range f.Decls {
			list, ok := decl.(*ast.GenDecl)
			if !ok || list.Tok != token.CONST {
				continue
			}

			for _, spec := range list.Specs {
				v := spec.(*ast.ValueSpec)
				for i, name := range v.Names {
					if !strings.HasPrefix(strings.ToLower(name.Name), "default") || i >= len(v.Values) {
						continue
					}
					if spellings := spellingsOf(t, set, v.Values[i]); spellings != nil {
						found[name.Name] = spellings
					}
				}
			}
		}
	}
	return found
}

// units are the units of package time, in nanoseconds.
var units = strings.NewReplacer("time.Millisecond", fmt.Sprint(int64(time.Millisecond)), "time.Second", fmt.Sprint(int64(time.Second)),
	"time.Minute", fmt.Sprint(int64(time.Minute)), "time.Hour", fmt.Sprint(int64(time.Hour)))

// spellingsOf returns how documentation may spell the value of an expression, or nil if it refers to another constant.
func spellingsOf(t *testing.T, set *token.FileSet, expr ast.Expr) []string {
	t.Helper()
	var text bytes.Buffer
	if err := printer.Fprint(&text, set, expr); err != nil {
		t.Fatal(err)
	}
	value, err := types.Eval(token.NewFileSet(), nil, token.NoPos, units.Replace(text.String()))
	if err != nil {
		return nil
	}

	n, isInt := constant.Int64Val(constant.ToInt(value.Value))
	switch {
	case value.Value.Kind() == constant.String:
		return []string{constant.StringVal(value.Value)}
	case !isInt:
		return []string{value.Value.String()}
	case strings.Contains(text.String(), "time."):
		return spellingsOfTime(time.Duration(n))
	}

	spellings := []string{fmt.Sprint(n)}
	if n >= 1000 {
		spellings = append(spellings, fmt.Sprintf("%d,%03d", n/1000, n%1000))
	}
	for size, unit := range map[int64]string{1 << 10: "KiB", 1 << 20: "MiB"} {
		if n >= size && n%size == 0 {
			spellings = append(spellings, fmt.Sprintf("%d %s", n/size, unit))
		}
	}
	return spellings
}

// spellingsOfTime returns how documentation may spell a time.
func spellingsOfTime(d time.Duration) (spellings []string) {
	for _, u := range []struct {
		size  time.Duration
		names []string
	}{
		{24 * time.Hour, []string{"d", "days"}},
		{time.Hour, []string{"h", "hours"}},
		{time.Minute, []string{"min", "minutes"}},
		{time.Second, []string{"s", "seconds"}},
		{time.Millisecond, []string{"ms"}},
	} {
		for _, name := range u.names {
			if d%u.size == 0 {
				spellings = append(spellings, fmt.Sprintf("%d %s", d/u.size, name))
			}
		}
	}
	return spellings
}
