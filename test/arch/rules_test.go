package arch

import (
	"fmt"
	"go/ast"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// The rules of the design are numbered N1, N2, … docs/rules.md lists the rules that the code mentions, each
// in at most 60 words, with the file that is its home, or – if only a field or a header of the rule is in this repository. A
// rule with a home has at least one test, named TestN13_…, that fails without the rule.
var (
	ruleRow  = regexp.MustCompile(`(?m)^\| \*\*N(\d+)\*\* [^|]* \| (.*) \| (?:–|\[[^\]]*\]\(\.\./([^)]+)\)) \|$`)
	mention  = regexp.MustCompile(`\bN(\d{1,2})\b`)
	ruleTest = regexp.MustCompile(`^TestN(\d+)_`)
)

func TestEachRuleHasOneHomeAndATest(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile(filepath.Join(moduleRoot(t), "docs", "rules.md"))
	if err != nil {
		t.Fatal(err)
	}
	reportProblems(t, ruleProblems(parseModule(t), string(text)))
}

func TestRuleRuleSeesStrays(t *testing.T) {
	t.Parallel()
	home := parseSource(t, "internal/relay/stored/lease/held.go", []byte("package lease\n\n// x is suspended, not lost (N2).\nvar x int\n"))
	other := parseSource(t, "internal/relay/process/a.go", []byte("package process\n\n// y obeys N2.\nvar y int // N2, utf8\n"))
	test := parseSource(t, "internal/relay/stored/lease/a_test.go", []byte("package lease\nfunc TestN02_SuspendedIsNotLost(t *testing.T) {}\n"))
	unknown := parseSource(t, "internal/relay/stored/lease/b_test.go", []byte("package lease\nfunc TestN77_Nothing(t *testing.T) {}\n"))
	const row, part = "| **N2** suspended | text | [lease/held.go](../internal/relay/stored/lease/held.go) |\n", "| **N2** suspended | text | – |\n"

	for _, c := range []struct {
		name  string
		files []source
		rules string
		want  string
	}{
		{"in order", []source{home, other, test}, row, ""},
		{"not listed", []source{home, test}, "", "N2 is not among the rules of docs/rules.md"},
		{"listed twice", []source{home, test}, row + row, "N2 appears 2 times in docs/rules.md"},
		{"home does not speak of it", []source{other, test}, row, "internal/relay/stored/lease/held.go, the home of N2 in docs/rules.md, does not mention it"},
		{"no test", []source{home, other}, row, "N2 has no test TestN02_"},
		{"test without a home", []source{other, test}, part, "N2 has tests"},
		{"only a field", []source{other}, part, ""},
		{"too long", []source{home, test}, strings.Replace(row, "text", strings.Repeat("word ", 61), 1), "N2 has 61 words"},
		{"unknown number", []source{home, test, unknown}, row, "N77"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			expectProblem(t, ruleProblems(c.files, c.rules), c.want)
		})
	}
}

// maxRuleWords is the maximum length of a rule. Its home has the details.
const maxRuleWords = 60

// ruleProblems compares the rules in docs/rules.md with the rules that the code mentions and tests.
func ruleProblems(files []source, document string) (out []string) {
	mentions, tests := map[int][]string{}, map[int][]string{}
	for _, f := range files {
		switch {
		case isWithin(f.dir, "test/arch"):
		case f.test:
			collectTests(f, tests)
		default:
			collectMentions(f, mentions)
		}
	}

	homes := map[int][]string{}
	for _, m := range ruleRow.FindAllStringSubmatch(document, -1) {
		n, _ := strconv.Atoi(m[1])
		homes[n] = append(homes[n], m[3])
		if words := len(strings.Fields(m[2])); words > maxRuleWords {
			out = append(out, fmt.Sprintf("N%d has %d words in docs/rules.md, want at most %d: its home has the details", n, words, maxRuleWords))
		}
	}

	numbers := slices.Collect(maps.Keys(homes))
	numbers = slices.AppendSeq(numbers, maps.Keys(mentions))
	numbers = slices.AppendSeq(numbers, maps.Keys(tests))
	slices.Sort(numbers)

	for _, n := range slices.Compact(numbers) {
		switch h := homes[n]; {
		case len(h) == 0:
			out = append(out, fmt.Sprintf("N%d is not among the rules of docs/rules.md; it is mentioned in %s", n, strings.Join(slices.Concat(mentions[n], tests[n]), ", ")))
		case len(h) > 1:
			out = append(out, fmt.Sprintf("N%d appears %d times in docs/rules.md", n, len(h)))
		case h[0] == "" && len(tests[n]) > 0:
			out = append(out, fmt.Sprintf("N%d has tests in %s, but no home in docs/rules.md", n, strings.Join(tests[n], ", ")))
		case h[0] == "":
		case !slices.Contains(mentions[n], h[0]):
			out = append(out, fmt.Sprintf("%s, the home of N%d in docs/rules.md, does not mention it", h[0], n))
		case len(tests[n]) == 0:
			out = append(out, fmt.Sprintf("N%d has no test TestN%02d_…; its home is %s", n, n, h[0]))
		}
	}
	return out
}

func collectTests(f source, tests map[int][]string) {
	for _, d := range f.ast.Decls {
		fn, ok := d.(*ast.FuncDecl)
		if !ok || fn.Recv != nil {
			continue
		}
		if m := ruleTest.FindStringSubmatch(fn.Name.Name); m != nil {
			n, _ := strconv.Atoi(m[1])
			if !slices.Contains(tests[n], f.path) {
				tests[n] = append(tests[n], f.path)
			}
		}
	}
}

func collectMentions(f source, mentions map[int][]string) {
	for _, group := range f.ast.Comments {
		for _, m := range mention.FindAllStringSubmatch(group.Text(), -1) {
			n, _ := strconv.Atoi(m[1])
			if !slices.Contains(mentions[n], f.path) {
				mentions[n] = append(mentions[n], f.path)
			}
		}
	}
}
