package arch

import (
	"fmt"
	"go/ast"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// timesFile is the only file with comparisons of the times of an envelope.
const timesFile = "internal/contract/envelope/conditions.go"

// indexCounts counts by an index alone and subtracts the lists.
const indexCounts = "internal/relay/stored/purge/loop.go"

func TestConditionsOnTimesHaveOneHome(t *testing.T) {
	t.Parallel()
	reportProblems(t, timeProblems(parseModule(t)))
}

func TestTimeRuleSeesFilters(t *testing.T) {
	t.Parallel()

	for _, c := range []struct{ file, text, want string }{
		{"internal/relay/stored/sweep/a.go", `var a = bson.D{{Key: "ts", Value: bson.D{{Key: "$gt", Value: 1}}}}`, "envelope.Stamped"},
		{"internal/service/agenda/a.go", `var a = bson.E{Key: "dueAt", Value: bson.D{x, {Key: "$type", Value: "date"}}}`, "envelope.Stamped"},
		{"internal/service/agenda/a.go", `var a = bson.D{{Key: "dueAt", Value: bson.D{{Key: "$ne", Value: 1}}}, {Key: "at", Value: bson.D{{Key: "$gt", Value: 1}}}}`, ""},
		{"internal/relay/stored/sweep/a_test.go", `var a = bson.D{{Key: "ts", Value: bson.D{{Key: "$gt", Value: 1}}}}`, ""},
		{timesFile, `var a = bson.D{{Key: "ts", Value: bson.D{{Key: "$gt", Value: 1}}}}`, ""},
	} {
		expectProblem(t, timeProblems([]source{parseSource(t, c.file, []byte("package x\n"+c.text+"\n"))}), c.want)
	}
}

// timeProblems finds filters that compare a time of an envelope outside of their home. They would match a list that contains a time.
func timeProblems(files []source) []string {
	var out []string
	for _, f := range files {
		if f.path == timesFile || f.path == indexCounts || strings.HasSuffix(f.path, "_test.go") || isForTests(f.dir) {
			continue
		}

		ast.Inspect(f.ast, func(n ast.Node) bool {
			key, value := keyAndValue(n)
			conditions, isLiteral := value.(*ast.CompositeLit)
			if !isLiteral || !slices.Contains([]string{"ts", "dueAt", "sentAt"}, key) {
				return true
			}
			for _, condition := range conditions.Elts {
				operator, _ := keyAndValue(condition)
				if slices.Contains([]string{"$gt", "$gte", "$lt", "$lte", "$type"}, operator) {
					out = append(out, fmt.Sprintf("%s: a condition on %s: use envelope.Stamped or envelope.Scheduled", f.fset.Position(n.Pos()), key))
				}
			}
			return true
		})
	}
	return out
}

// keyAndValue returns the fields Key and Value of a literal of an element of a document.
func keyAndValue(n ast.Node) (key string, value ast.Expr) {
	literal, isLiteral := n.(*ast.CompositeLit)
	if !isLiteral {
		return "", nil
	}
	for _, element := range literal.Elts {
		field, isField := element.(*ast.KeyValueExpr)
		if !isField {
			continue
		}
		name, _ := field.Key.(*ast.Ident)
		text, isText := field.Value.(*ast.BasicLit)
		switch {
		case name == nil:
		case name.Name == "Key" && isText:
			key, _ = strconv.Unquote(text.Value)
		case name.Name == "Value":
			value = field.Value
		}
	}
	return key, value
}
