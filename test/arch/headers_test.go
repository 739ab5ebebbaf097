package arch

import (
	"fmt"
	"go/ast"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/outrelay/outrelay/internal/contract/record"
)

// headersFile is the only file that spells the names of the relay's headers.
const headersFile = "internal/contract/record/header.go"

var headerNames = []string{
	record.ReservedPrefix, record.HeaderIDType, record.HeaderNamespace, record.HeaderDelivery, record.HeaderRedelivered, record.HeaderOnly,
	record.HeaderAttempt, record.HeaderRetryDue, record.HeaderRetryOrigin, record.HeaderRetryHistory, record.HeaderDeliverBy,
	record.HeaderCorrelationID, record.HeaderCausationID, record.HeaderCECorrelationID,
}

func TestHeaderNamesHaveOneHome(t *testing.T) {
	t.Parallel()
	reportProblems(t, headerProblems(parseModule(t)))
}

func TestHeaderRuleSeesLiterals(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ file, text, want string }{
		{"pkg/consumer/a.go", `const h = "outrelay-ns"`, "outrelay-ns"},
		{"pkg/event/a.go", `var h = []byte("outrelay-")`, "outrelay-"},
		{"test/kit/a.go", `const h = "outrelay-retry-due"`, "outrelay-retry-due"},
		{"test/kit/a_test.go", `const h = "outrelay-ns"`, ""},
		{"internal/lab/demo/a.go", `const h = "outrelay-dev"`, ""},
		{headersFile, `const h = "outrelay-ns"`, ""},
	} {
		expectProblem(t, headerProblems([]source{parseSource(t, c.file, []byte("package x\n"+c.text+"\n"))}), c.want)
	}
}

// headerProblems finds literals with the name of a header outside of its home. A test may spell a name.
func headerProblems(files []source) []string {
	var out []string
	for _, f := range files {
		if f.path == headersFile || strings.HasSuffix(f.path, "_test.go") {
			continue
		}
		ast.Inspect(f.ast, func(n ast.Node) bool {
			lit, ok := n.(*ast.BasicLit)
			if !ok {
				return true
			}
			if text, err := strconv.Unquote(lit.Value); err == nil && slices.Contains(headerNames, text) {
				out = append(out, fmt.Sprintf("%s: %q: use the constant of internal/contract/record", f.fset.Position(lit.Pos()), text))
			}
			return true
		})
	}

	return out
}
