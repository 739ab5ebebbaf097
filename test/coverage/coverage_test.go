package coverage

import (
	"cmp"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
)

const (
	top      = "../.."
	document = "test/coverage/rows.md"
)

// requirements lists the ids in the document by family.
var requirements = []string{
	"R1-44",
	"L1-15 L17-40 L42",
	"W1-124",
	"I1-42",
	"S1-58",
	"K1-36",
	"O1-70",
	"M1-20",
	"T1 T3-4 T6-7 T9-10 T12-13 T15-16 T18-19 T21-22 T24-25 T27-28 T30-31 T33-34 T36-37 T39-40 T42-43 T45-46 T48-49 T51-52 T54-55 T57-58 T60-61 T63-64 T66-67 T69-70 T72-73 T75-76 T78-79 T81-82 T84-85 T87-88 T90-91 T93-94 T96-97 T99-100 T102-103 T105-106 T108-109 T111-112 T114-115 T117-118 T120-121 T123-124 T126",
}

var (
	testName = regexp.MustCompile("`([a-z0-9_/]+)\\.((?:Test|Fuzz|Example|Benchmark)\\w*)`")
	link     = regexp.MustCompile(`\]\(([^)]+)\)`)
	fenced   = regexp.MustCompile("(?ms)^```.*?^```")
)

// row is one row of a table in the document.
type row struct{ id, does, shown string }

func TestEveryRowHasALine(t *testing.T) {
	t.Parallel()
	seen := map[string]int{}
	for _, l := range readRows(t) {
		seen[l.id]++
		if l.does == "" || l.shown == "" {
			t.Errorf("%s: %s: an empty cell", document, l.id)
		}
	}

	want := map[string]bool{}
	for _, id := range expandRanges(t, strings.Join(requirements, " ")) {
		want[id] = true
		if seen[id] != 1 {
			t.Errorf("%s: %d rows for %s, want 1", document, seen[id], id)
		}
	}

	for id := range seen {
		if !want[id] {
			t.Errorf("%s: %s is not a requirement of this version", document, id)
		}
	}
}

func TestEveryNameExists(t *testing.T) {
	t.Parallel()
	dirs := map[string]map[string]testFunction{}
	for _, l := range readRows(t) {
		names, links := testName.FindAllStringSubmatch(l.shown, -1), link.FindAllStringSubmatch(l.shown, -1)
		if len(names)+len(links) == 0 {
			t.Errorf("%s: %s names neither a test nor a document: %s", document, l.id, l.shown)
		}
		if quotes := strings.Count(l.shown, "`"); quotes != 2*len(names) {
			t.Errorf("%s: %s has a name that is not of the form directory.TestName: %s", document, l.id, l.shown)
		}

		for _, m := range names {
			if dirs[m[1]] == nil {
				dirs[m[1]] = listTests(t, m[1])
			}
			if !dirs[m[1]][m[2]].exists {
				t.Errorf("%s: %s: %s has no %s", document, l.id, m[1], m[2])
			}
		}

		for _, m := range links {
			if err := checkLink(document, m[1]); err != nil {
				t.Errorf("%s: %s: %v", document, l.id, err)
			}
		}
	}
}

// TestTheFaultsNameTests checks that each test in docs/faults.md exists. A name without a package is one of test/fault.
func TestTheFaultsNameTests(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile(filepath.Join(top, "docs/faults.md"))
	if err != nil {
		t.Fatal(err)
	}

	names := regexp.MustCompile("`(?:([a-z0-9_/]+)\\.)?(Test\\w+)`").FindAllStringSubmatch(string(text), -1)
	if len(names) < 30 {
		t.Fatalf("docs/faults.md names %d tests", len(names))
	}
	dirs := map[string]map[string]testFunction{}
	for _, m := range names {
		dir := cmp.Or(m[1], "test/fault")
		if dirs[dir] == nil {
			dirs[dir] = listTests(t, dir)
		}
		if !dirs[dir][m[2]].exists {
			t.Errorf("docs/faults.md: %s has no %s", dir, m[2])
		}
	}
}

// TestLinksLeadSomewhere checks the links inside the repository in all documents.
func TestLinksLeadSomewhere(t *testing.T) {
	t.Parallel()
	for _, pattern := range []string{"*.md", "docs/*.md", "docs/*/*.md", "examples/*/*.md", "test/*.md"} {
		files, err := filepath.Glob(filepath.Join(top, pattern))
		if err != nil {
			t.Fatal(err)
		}

		for _, name := range files {
			text, err := os.ReadFile(name)
			if err != nil {
				t.Fatal(err)
			}
			from, err := filepath.Rel(top, name)
			if err != nil {
				t.Fatal(err)
			}

			for _, m := range link.FindAllStringSubmatch(fenced.ReplaceAllString(string(text), ""), -1) {
				if strings.Contains(m[1], "://") {
					continue
				}
				if err := checkLink(filepath.ToSlash(from), m[1]); err != nil {
					t.Errorf("%s: %v", from, err)
				}
			}
		}
	}
}

func TestExpand(t *testing.T) {
	t.Parallel()
	if got, want := fmt.Sprint(expandRanges(t, "R1-3 L7")), "[R1 R2 R3 L7]"; got != want {
		t.Errorf("got %s, want %s", got, want)
	}
}

func TestAnchors(t *testing.T) {
	t.Parallel()
	for heading, want := range map[string]string{
		"What it promises":                  "what-it-promises",
		"One event, from commit to Kafka":   "one-event-from-commit-to-kafka",
		"`outrelay dev` in ten minutes":     "outrelay-dev-in-ten-minutes",
		"A lock-order of a kind (and more)": "a-lock-order-of-a-kind-and-more",
	} {
		if got := anchorOf(heading); got != want {
			t.Errorf("anchor of %q is %q, want %q", heading, got, want)
		}
	}

	if checkLink(document, "../../README.md#no-such-heading") == nil || checkLink(document, "../NOTHING.md") == nil {
		t.Error("checkLink returned no error for a broken link")
	}
}

// readRows returns the rows of all tables in the document.
func readRows(tb testing.TB) []row {
	tb.Helper()
	text, err := os.ReadFile(filepath.Join(top, document))
	if err != nil {
		tb.Fatal(err)
	}

	var out []row
	for s := range strings.Lines(string(text)) {
		cells := strings.Split(strings.Trim(strings.TrimSpace(s), "|"), "|")
		if !strings.HasPrefix(s, "|") || len(cells) < 3 {
			continue
		}

		for i := range cells {
			cells[i] = strings.TrimSpace(cells[i])
		}
		if id := cells[0]; id != "id" && !strings.HasPrefix(id, "---") {
			if len(cells) != 3 {
				tb.Errorf("%s: %s has %d cells, want 3", document, id, len(cells))
				continue
			}
			out = append(out, row{id, cells[1], cells[2]})
		}
	}
	return out
}

// expandRanges expands ranges of ids: "R1-3" is R1 R2 R3.
func expandRanges(tb testing.TB, s string) []string {
	tb.Helper()
	var out []string
	for _, f := range strings.Fields(s) {
		from, to, ok := strings.Cut(f[1:], "-")
		if !ok {
			to = from
		}

		a, errA := strconv.Atoi(from)
		b, errB := strconv.Atoi(to)
		if errA != nil || errB != nil || a > b {
			tb.Fatalf("%q is neither an id nor a range", f)
		}
		for n := a; n <= b; n++ {
			out = append(out, fmt.Sprintf("%c%d", f[0], n))
		}
	}
	return out
}

// testFunction is a function in a test file.
type testFunction struct {
	exists bool
	flags  []string // the test does nothing unless one of these flags is given
}

// dirOf returns the directory of a package that a document names: by its path, or, below internal/, by the end of its path, which no other
// package has.
func dirOf(tb testing.TB, name string) string {
	tb.Helper()
	if _, err := os.Stat(filepath.Join(top, filepath.FromSlash(name))); err == nil {
		return name
	}

	var found []string
	err := filepath.WalkDir(filepath.Join(top, "internal"), func(dir string, d os.DirEntry, err error) error {
		if err != nil || !d.IsDir() || !strings.HasSuffix(filepath.ToSlash(dir), "/"+name) {
			return err
		}
		rel, err := filepath.Rel(top, dir)
		found = append(found, filepath.ToSlash(rel))
		return err
	})
	if err != nil {
		tb.Fatal(err)
	}
	if len(found) != 1 {
		tb.Errorf("the packages below internal/ that end with %s are %q, want one", name, found)
		return name
	}
	return found[0]
}

func TestPackagesAreFoundByTheEndOfTheirPath(t *testing.T) {
	t.Parallel()
	stack := dirOf(t, "devstack/stacktest")
	for name, want := range map[string]string{"stacktest": stack, "pkg/inbox": "pkg/inbox", "test/fault": "test/fault", stack: stack} {
		if got := dirOf(t, name); got != want {
			t.Errorf("directory of %s is %s, want %s", name, got, want)
		}
	}
}

// listTests returns the functions in the test files of a package, see dirOf.
func listTests(tb testing.TB, dir string) map[string]testFunction {
	tb.Helper()
	files, err := filepath.Glob(filepath.Join(top, filepath.FromSlash(dirOf(tb, dir)), "*_test.go"))
	if err != nil {
		tb.Fatal(err)
	}

	out := map[string]testFunction{}
	for _, name := range files {
		f, err := parser.ParseFile(token.NewFileSet(), name, nil, parser.SkipObjectResolution)
		if err != nil {
			tb.Fatal(err)
		}
		for _, d := range f.Decls {
			if fn, ok := d.(*ast.FuncDecl); ok && fn.Recv == nil {
				out[fn.Name.Name] = testFunction{exists: true, flags: requiredFlags(fn)}
			}
		}
	}
	return out
}

// requiredFlags returns the flags that fn passes to stacktest.OnlyWith.
func requiredFlags(fn *ast.FuncDecl) (flags []string) {
	ast.Inspect(fn, func(n ast.Node) bool {
		call, ok := n.(*ast.CallExpr)
		if !ok {
			return true
		}
		if called, ok := call.Fun.(*ast.SelectorExpr); !ok || called.Sel.Name != "OnlyWith" {
			return true
		}
		for _, arg := range call.Args[2:] {
			if text, ok := arg.(*ast.BasicLit); ok {
				flags = append(flags, strings.Trim(text.Value, `"`))
			}
		}
		return true
	})
	return flags
}

// TestEveryNamedTestRuns checks that a test which a row names is run by `go test ./...`, by .ci/run, or by a workflow: a test that
// only runs with a flag which nobody passes shows nothing.
func TestEveryNamedTestRuns(t *testing.T) {
	t.Parallel()
	read := func(pattern string) (text string) {
		files, err := filepath.Glob(filepath.Join(top, pattern))
		if err != nil || len(files) == 0 {
			t.Fatalf("no %s: %v", pattern, err)
		}
		for _, name := range files {
			part, err := os.ReadFile(name)
			if err != nil {
				t.Fatal(err)
			}
			text += string(part)
		}
		return text
	}
	script, workflows := read(".ci/run"), read(".github/workflows/*.yml")
	isPassed := func(dir, flag string) bool {
		option := regexp.MustCompile(`(^|\s)-` + regexp.QuoteMeta(flag) + `(\s|$)`)
		for line := range strings.Lines(workflows) {
			if strings.Contains(line, "./"+dir+" ") && option.MatchString(line) {
				return true
			}
		}
		return option.MatchString(script)
	}

	if !isPassed("test/fault", "fault.long") || isPassed("test/fault", "no.such.flag") || isPassed("internal/relay/internal/sink", "fault.long") {
		t.Error("isPassed does not see the flags of the workflows")
	}

	dirs := map[string]map[string]testFunction{}
	for _, l := range readRows(t) {
		for _, m := range testName.FindAllStringSubmatch(l.shown, -1) {
			if dirs[m[1]] == nil {
				dirs[m[1]] = listTests(t, m[1])
			}
			flags := dirs[m[1]][m[2]].flags
			if len(flags) > 0 && !slices.ContainsFunc(flags, func(flag string) bool { return isPassed(dirOf(t, m[1]), flag) }) {
				t.Errorf("%s: %s: nothing runs %s.%s, which needs -%s: pass it in .ci/run or in a workflow",
					document, l.id, m[1], m[2], strings.Join(flags, " or -"))
			}
		}
	}
}

// checkLink returns an error unless a link in the document from leads to an existing file and, with a fragment, to a heading.
func checkLink(from, to string) error {
	name, fragment, has := strings.Cut(to, "#")
	file := path.Join(path.Dir(from), name)
	if name == "" {
		file = from
	}
	if !has {
		_, err := os.Stat(filepath.Join(top, filepath.FromSlash(file)))
		return err
	}

	text, err := os.ReadFile(filepath.Join(top, filepath.FromSlash(file)))
	if err != nil {
		return err
	}

	for s := range strings.Lines(string(text)) {
		heading := strings.TrimLeft(s, "#")
		isHeading := heading != s && strings.HasPrefix(heading, " ")
		if isHeading && anchorOf(strings.TrimSpace(heading)) == fragment {
			return nil
		}
	}
	return fmt.Errorf("%s has no heading #%s", file, fragment)
}

// anchorOf returns the fragment that Markdown renderers give a heading.
func anchorOf(heading string) string {
	var b strings.Builder
	for _, r := range strings.ToLower(heading) {
		switch {
		case r >= 'a' && r <= 'z' || r >= '0' && r <= '9' || r == '-' || r == '_' || r > 127:
			b.WriteRune(r)
		case r == ' ':
			b.WriteByte('-')
		}
	}
	return b.String()
}
