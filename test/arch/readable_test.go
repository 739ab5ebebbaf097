package arch

import (
	"path/filepath"
	"strings"
	"testing"

	"github.com/outrelay/outrelay/test/arch/readable"
)

// The bounds of the figures that test/measure prints. They keep the product from growing back into text that has to be read
// twice. Squeezing code to stay within a bound defeats its purpose: a function that is cut into five helpers, or lines without a
// thought between them, are worse than the figure. If a bound stands in the way of a clear change, change the bound.
const (
	mostWithoutParagraph = 4.0  // percent of the functions of 15 lines and more
	mostWithoutInTests   = 5.0  // the same of tests: some are one table and one loop
	mostOneWord          = 10.0 // percent of the unexported function names
	mostUnclear          = 1.5  // wordings per 1,000 words of comment, also in tests
	mostUnclearTexts     = 0    // wordings in string literals: errors, logs, help
	mostTrailingReasons  = 20   // comments of more than five words at the ends of lines inside functions: legends of fields and cases
	mostDefined          = 8    // definitions of one unexported function name, in the product or in tests
	mostMethods          = 60   // of a type
	mostLocals           = 2.0  // percent of the local variables with one letter
	mostParameters       = 3.0  // the same of parameters and results: a and b in comparisons
	mostWordParameters   = 0    // parameters that are English function words: a sentence about them must be read twice
	mostBareBooleans     = 0    // calls such as remove(ctx, true): a named value, or two functions, can be read without the declaration
	mostMarkdown         = 475  // KB that people write
	mostFields           = 28   // of a type; the configuration has 28 keys and sections: on_drop fits into none of the sections
)

// measureTrees measures the directories: their product code, or their tests.
func measureTrees(t *testing.T, tests bool, dirs ...string) *readable.Measure {
	t.Helper()
	m := readable.New()
	for _, dir := range dirs {
		if err := m.AddTree(filepath.Join("..", "..", dir), tests); err != nil {
			t.Fatal(err)
		}
	}
	return m
}

func TestTestsAreReadable(t *testing.T) {
	t.Parallel()
	m := measureTrees(t, true, "cmd", "internal", "pkg", "resume", "test")

	if got := m.WithoutParagraph(); got > mostWithoutInTests {
		t.Errorf("test functions of 15 lines or more without a blank line: %.1f percent, want at most %.1f; "+
			"`go run ./test/measure -tests -list` lists the places", got, mostWithoutInTests)
	}
	if got := m.Unclear(); got > mostUnclear {
		t.Errorf("unclear wordings per 1,000 words of comment in tests: %.1f, want at most %.1f; "+
			"`go run ./test/measure -tests -list` lists the places", got, mostUnclear)
	}
	atMost(t, "definitions in tests of the function name", m.Defined(), mostDefined)
}

func TestTheProductIsReadable(t *testing.T) {
	t.Parallel()
	m := measureTrees(t, false, "cmd", "internal", "pkg", "resume")

	for _, c := range []struct {
		what      string
		got, most float64
	}{
		{"functions of 15 lines or more without a blank line, percent", m.WithoutParagraph(), mostWithoutParagraph},
		{"unexported function names of one word, percent", m.OneWord(), mostOneWord},
		{"unclear wordings per 1,000 words of comment", m.Unclear(), mostUnclear},
		{"unclear wordings in string literals", float64(m.UnclearTexts()), mostUnclearTexts},
		{"local variables with names of one letter, percent", m.OneLetterLocals(), mostLocals},
		{"parameters with names of one letter, percent", m.OneLetterParameters(), mostParameters},
		{"parameters that are English function words", float64(m.WordParameters()), mostWordParameters},
		{"bare boolean arguments", float64(len(m.BareBooleans())), mostBareBooleans},
		{"reasons at the ends of lines inside functions", float64(m.TrailingReasons()), mostTrailingReasons},
	} {
		if c.got > c.most {
			t.Errorf("%s: %.1f, want at most %.1f; `go run ./test/measure -list` lists the places", c.what, c.got, c.most)
		}
	}
	atMost(t, "definitions of the function name", m.Defined(), mostDefined)
	atMost(t, "methods of", m.Methods(), mostMethods)
	atMost(t, "fields of", m.Fields(), mostFields)
}

// atMost reports each name whose count is above most.
func atMost(t *testing.T, what string, counts map[string]int, most int) {
	t.Helper()
	for name, n := range counts {
		name = strings.TrimPrefix(name, "../../")
		if n > most {
			t.Errorf("%d %s %s, want at most %d", n, what, name, most)
		}
	}
}
