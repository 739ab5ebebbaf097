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

// The rules of the design are numbered N1, N2, … A rule has one home in the code, a line of comment that begins with
// "N13:" (or "N13, N14:", or "<name> is N13:", as documentation begins with a name), and at least one test that fails without it,
// named TestN13_…. Every other place mentions the rule in passing, as (N13).
const lastRule = 29

var (
	homeComment = regexp.MustCompile(`(?:^|\b(?:is|are) )(N\d+(?:(?:,| and|, and) N\d+)*):`)
	ruleNumber  = regexp.MustCompile(`N(\d+)`)
	mention     = regexp.MustCompile(`\bN(\d{1,2})\b`)
	ruleTest    = regexp.MustCompile(`^TestN(\d+)_`)
)

func TestEachRuleHasOneHomeAndATest(t *testing.T) {
	t.Parallel()
	report(t, ruleProblems(tree(t)))
}

func TestRuleRuleSeesStrays(t *testing.T) {
	t.Parallel()
	home := parse(t, "internal/lease/a.go", []byte("package lease\n\n// N2: suspended is not lost.\nvar x int\n"))
	named := parse(t, "internal/lease/b.go", []byte("package lease\n\n// budget is N2: one reservation.\nvar budget int\n"))
	test := parse(t, "internal/lease/a_test.go", []byte("package lease\nfunc TestN02_SuspendedIsNotLost(t *testing.T) {}\n"))
	inText := parse(t, "internal/lease/c.go", []byte("package lease\n\n// y obeys the window (N2), see N2's text.\nvar y int\n"))
	passing := parse(t, "internal/lease/d.go", []byte("package lease\n\nvar z int // N2\n"))
	unknown := parse(t, "internal/lease/a_test.go", []byte("package lease\nfunc TestN77_Nothing(t *testing.T) {}\n"))
	for _, c := range []struct {
		files []source
		want  string
	}{
		{[]source{home, test, inText, passing}, ""},
		{[]source{named, test}, ""},
		{[]source{home, named, test}, "N2 has 2 homes"},
		{[]source{test, inText}, "N2 has no home"},
		{[]source{home}, "N2 has no test"},
		{[]source{home, test, unknown}, "N77"},
	} {
		finds(t, ruleProblems(c.files), c.want)
	}
}

func TestEachRuleThatIsNamedIsExplained(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile(filepath.Join(root(t), "DESIGN.md"))
	if err != nil {
		t.Fatal(err)
	}
	report(t, explainProblems(tree(t), string(text)))
}

func TestExplainRuleSeesStrays(t *testing.T) {
	t.Parallel()
	src := parse(t, "internal/lease/a.go", []byte("package lease\n\n// x is unlike y (N2, N31, and utf8).\nvar x int\n"))
	finds(t, explainProblems([]source{src}, "| **N2** suspended |"), "N31")
	finds(t, explainProblems([]source{src}, "| **N2** suspended | **N31** |"), "")
}

// explainProblems names the rules that a comment mentions and the design does not explain.
func explainProblems(files []source, design string) []string {
	first := map[int]string{}
	for _, f := range files {
		if within(f.dir, "test/arch") {
			continue
		}
		for _, group := range f.ast.Comments {
			for _, m := range mention.FindAllStringSubmatch(group.Text(), -1) {
				if n, _ := strconv.Atoi(m[1]); first[n] == "" {
					first[n] = f.path
				}
			}
		}
	}
	var out []string
	for _, n := range slices.Sorted(maps.Keys(first)) {
		if !strings.Contains(design, fmt.Sprintf("**N%d**", n)) {
			out = append(out, fmt.Sprintf("%s mentions N%d, which DESIGN.md does not explain", first[n], n))
		}
	}
	return out
}

// ruleProblems compares homes and tests for the rules that have either.
func ruleProblems(files []source) []string {
	homes, tests := map[int][]string{}, map[int][]string{}
	for _, f := range files {
		if f.test {
			for _, d := range f.ast.Decls {
				fn, ok := d.(*ast.FuncDecl)
				if !ok || fn.Recv != nil {
					continue
				}
				if m := ruleTest.FindStringSubmatch(fn.Name.Name); m != nil {
					n, _ := strconv.Atoi(m[1])
					tests[n] = append(tests[n], f.path)
				}
			}
			continue
		}
		for _, n := range homesIn(f) {
			homes[n] = append(homes[n], f.path)
		}
	}
	numbers := slices.Collect(maps.Keys(homes))
	for n := range tests {
		if _, ok := homes[n]; !ok {
			numbers = append(numbers, n)
		}
	}
	slices.Sort(numbers)
	var out []string
	for _, n := range numbers {
		switch {
		case n < 1 || n > lastRule:
			out = append(out, fmt.Sprintf("N%d is no rule of the design: %s", n, strings.Join(slices.Concat(homes[n], tests[n]), ", ")))
		case len(homes[n]) == 0:
			out = append(out, fmt.Sprintf("N%d has no home; its tests are in %s", n, strings.Join(slices.Compact(tests[n]), ", ")))
		case len(homes[n]) > 1:
			out = append(out, fmt.Sprintf("N%d has %d homes: %s", n, len(homes[n]), strings.Join(homes[n], ", ")))
		case len(tests[n]) == 0:
			out = append(out, fmt.Sprintf("N%d has no test TestN%02d_…; its home is %s", n, n, homes[n][0]))
		}
	}
	return out
}

// homesIn lists the rules that lines of comment in the file say they are the home of.
func homesIn(f source) []int {
	var out []int
	for _, group := range f.ast.Comments {
		for _, c := range group.List {
			text := strings.TrimSpace(strings.TrimPrefix(c.Text, "//"))
			for _, m := range homeComment.FindAllStringSubmatch(text, -1) {
				for _, k := range ruleNumber.FindAllStringSubmatch(m[1], -1) {
					n, _ := strconv.Atoi(k[1])
					out = append(out, n)
				}
			}
		}
	}
	return out
}
