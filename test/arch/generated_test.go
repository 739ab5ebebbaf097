package arch

import (
	"fmt"
	"go/ast"
	"strconv"
	"strings"
	"testing"
)

// Files that are made from the code are written by go run ./test/regenerate, and not by a flag of each test.
func TestGeneratedFilesHaveOneCommand(t *testing.T) {
	t.Parallel()
	reportProblems(t, updateFlagProblems(parseModule(t)))
}

func TestUpdateFlagRuleSeesFlags(t *testing.T) {
	t.Parallel()

	for _, c := range []struct{ file, text, want string }{
		{"internal/contract/config/a_test.go", `var u = flag.Bool("update", false, "write a.json")`, "test/generated"},
		{"test/docs/a_test.go", `var u = flag.Bool("update-docs", false, "")`, "test/generated"},
		{"test/docs/a_test.go", `var u = flag.Bool("docs.long", false, "")`, ""},
		{"cmd/outrelay/a.go", `var u = flags.String("update", "", "")`, ""},
	} {
		expectProblem(t, updateFlagProblems([]source{parseSource(t, c.file, []byte("package x\n"+c.text+"\n"))}), c.want)
	}
}

// updateFlagProblems finds flags of tests with which a test writes its file.
func updateFlagProblems(files []source) []string {
	var out []string
	for _, f := range files {
		if !strings.HasSuffix(f.path, "_test.go") {
			continue
		}

		ast.Inspect(f.ast, func(n ast.Node) bool {
			call, ok := n.(*ast.CallExpr)
			if !ok || len(call.Args) == 0 {
				return true
			}
			on, isSelector := call.Fun.(*ast.SelectorExpr)
			name, isText := call.Args[0].(*ast.BasicLit)
			if !isSelector || !isText {
				return true
			}

			room, _ := on.X.(*ast.Ident)
			if text, err := strconv.Unquote(name.Value); err == nil && room != nil && room.Name == "flag" && strings.HasPrefix(text, "update") {
				out = append(out, fmt.Sprintf("%s: flag %s: compare the file by test/generated", f.fset.Position(call.Pos()), text))
			}
			return true
		})
	}
	return out
}
