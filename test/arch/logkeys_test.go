package arch

import (
	"fmt"
	"go/ast"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// handlerKeys are the keys that a handler writes into each line. An attribute of that name would be a second value of the key.
var handlerKeys = []string{"time", "level", "msg"}

// logCalls are the names of the functions of the logger and of package slog that take keys.
var logCalls = strings.Fields("Debug Info Warn Error Log With DebugContext InfoContext WarnContext ErrorContext LogAttrs " +
	"Any String Int Int64 Uint64 Float64 Bool Time Duration Group")

func TestALogLineHasNoKeyOfItsHandler(t *testing.T) {
	t.Parallel()
	reportProblems(t, logKeyProblems(parseModule(t)))

	for text, want := range map[string]string{
		`func f() { log.Info("took over", "time", 3) }`:              `"time"`,
		`func f() { log.With("level", 3).Info("x") }`:                `"level"`,
		`func f() { log.Info("x", slog.String("msg", "y")) }`:        `"msg"`,
		`var line = []any{"topic", "t", "time", 3}`:                  `"time"`,
		`func f() { log.Info("time", "cluster_time", 3) }`:           "",
		`func f() { bson.Lookup("time") }`:                           "",
		`var names = []string{"time"}`:                               "",
		`func f() { log.Info("x", "unit", unit{"level"}.String()) }`: "",
	} {
		expectProblem(t, logKeyProblems([]source{parseSource(t, "internal/relay/a.go", []byte("package x\n"+text+"\n"))}), want)
	}
}

// logKeyProblems finds attributes of log lines with a key of the handler: in calls of loggers, and in lists of keys and values.
func logKeyProblems(files []source) []string {
	var out []string
	for _, f := range files {
		if strings.HasSuffix(f.path, "_test.go") {
			continue
		}
		check := func(list []ast.Expr) {
			for _, expr := range list {
				literal, ok := expr.(*ast.BasicLit)
				if !ok {
					continue
				}
				if key, err := strconv.Unquote(literal.Value); err == nil && slices.Contains(handlerKeys, key) {
					out = append(out, fmt.Sprintf("%s: the attribute %q repeats a key of each log line", f.fset.Position(literal.Pos()), key))
				}
			}
		}
		ast.Inspect(f.ast, func(node ast.Node) bool {
			switch node := node.(type) {
			case *ast.CallExpr:
				check(logKeys(node))
			case *ast.CompositeLit:
				if list, ok := node.Type.(*ast.ArrayType); ok && fmt.Sprint(list.Elt) == "any" {
					check(node.Elts)
				}
			}
			return true
		})
	}
	return out
}

// logKeys returns the arguments of a call that may be keys of a log line.
func logKeys(call *ast.CallExpr) []ast.Expr {
	function, ok := call.Fun.(*ast.SelectorExpr)
	if !ok || !slices.Contains(logCalls, function.Sel.Name) || len(call.Args) == 0 {
		return nil
	}
	switch function.Sel.Name {
	case "Debug", "Info", "Warn", "Error":
		return call.Args[1:]
	}
	return call.Args
}

// A text that the program does not log makes a check that no line contains it pass always.
func TestTheProgramLogsTheTextsThatTestsLookFor(t *testing.T) {
	t.Parallel()
	reportProblems(t, unloggedTexts(parseModule(t)))

	product := parseSource(t, "internal/relay/a.go", []byte("package x\nfunc f() { log.Info(\"the gap is closed\") }\n"))
	for text, want := range map[string]string{
		`p.HasLogged("gap is closed")`: "",
		`p.HasLogged("gap is open")`:   `"gap is open"`,
		`p.HasLogged(token)`:           "",
	} {
		test := parseSource(t, "test/fault/a_test.go", []byte("package x\nfunc g() { "+text+" }\n"))
		expectProblem(t, unloggedTexts([]source{product, test}), want)
	}
}

// unloggedTexts finds literal texts that tests look for in a log, and that are part of no text of the program.
func unloggedTexts(files []source) []string {
	var texts []string
	for _, f := range files {
		// The relay contains no service, and the programs of the lab write other logs.
		ofRelay := slices.ContainsFunc([]string{"cmd/", "internal/base/", "internal/operate/", "internal/relay/"}, func(dir string) bool { return strings.HasPrefix(f.path, dir) })
		if ofRelay && !f.test {
			ast.Inspect(f.ast, func(node ast.Node) bool {
				if literal, ok := node.(*ast.BasicLit); ok {
					texts = append(texts, literal.Value)
				}
				return true
			})
		}
	}

	var out []string
	for _, f := range files {
		ast.Inspect(f.ast, func(node ast.Node) bool {
			call, ok := node.(*ast.CallExpr)
			if !ok || len(call.Args) != 1 {
				return true
			}
			function, ok := call.Fun.(*ast.SelectorExpr)
			literal, isLiteral := call.Args[0].(*ast.BasicLit)
			if !ok || !isLiteral || function.Sel.Name != "HasLogged" {
				return true
			}

			quoted := strings.Trim(literal.Value, "`\"")
			if !slices.ContainsFunc(texts, func(text string) bool { return strings.Contains(text, quoted) }) {
				out = append(out, fmt.Sprintf("%s: the program logs no text %s", f.fset.Position(literal.Pos()), literal.Value))
			}
			return true
		})
	}
	return out
}
