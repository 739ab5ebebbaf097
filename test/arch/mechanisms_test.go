package arch

import (
	"fmt"
	"go/ast"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/outrelay/outrelay/internal/contract/sasl"
)

// mechanismsDir is the only room that spells the names of SASL mechanisms.
const mechanismsDir = "internal/contract/sasl/"

// plainFormatDir names a format of records like the mechanism for a password as it is.
const plainFormatDir = "internal/contract/routing/"

func TestMechanismsHaveOneHome(t *testing.T) {
	t.Parallel()
	reportProblems(t, mechanismProblems(parseModule(t)))
}

func TestMechanismRuleSeesLiterals(t *testing.T) {
	t.Parallel()

	for _, c := range []struct{ file, text, want string }{
		{"internal/contract/config/a.go", `type t struct{ a string ` + "`enum:\"scram-sha-256,x\"`" + ` }`, "scram-sha-256"},
		{"internal/service/transport/a.go", `var a = map[string]int{"PLAIN": 1}`, "plain"},
		{"internal/operate/doctor/a.go", `const a = "also by OAUTHBEARER"`, "oauthbearer"},
		{"internal/kafkawire/a.go", `const a = "AWS_MSK_IAM"`, "aws_msk_iam"},
		{"internal/relay/connect/a.go", `const a = "plain text"`, ""},
		{"internal/relay/connect/a_test.go", `const a = "oauthbearer"`, ""},
		{plainFormatDir + "a.go", `const a = "plain"`, ""},
		{mechanismsDir + "a.go", `const a = "oauthbearer"`, ""},
	} {
		expectProblem(t, mechanismProblems([]source{parseSource(t, c.file, []byte("package x\n"+c.text+"\n"))}), c.want)
	}
}

// mechanismProblems finds literals with the name of a SASL mechanism outside of its home. A test may spell a name. A name that is also
// a common word counts only if it is the whole text.
func mechanismProblems(files []source) []string {
	var out []string
	for _, f := range files {
		if strings.HasPrefix(f.path, mechanismsDir) || strings.HasSuffix(f.path, "_test.go") || isForTests(f.dir) {
			continue
		}

		ast.Inspect(f.ast, func(n ast.Node) bool {
			lit, ok := n.(*ast.BasicLit)
			if !ok {
				return true
			}

			text, err := strconv.Unquote(lit.Value)
			text = strings.ToLower(text)
			i := slices.IndexFunc(sasl.Names(), func(name string) bool {
				if name == "plain" {
					return text == name && !strings.HasPrefix(f.path, plainFormatDir)
				}
				return strings.Contains(text, name)
			})
			if err == nil && i >= 0 {
				out = append(out, fmt.Sprintf("%s: %q has the mechanism %s: use the table of internal/contract/sasl",
					f.fset.Position(lit.Pos()), text, sasl.Names()[i]))
			}
			return true
		})
	}
	return out
}
