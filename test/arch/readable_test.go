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
	mostWithoutParagraph = 25.0 // percent of the functions of 15 lines and more
	mostOneWord          = 24.0 // percent of the unexported function names
	mostUnclear          = 8.5  // wordings per 1,000 words of comment
	mostDefined          = 13   // definitions of one unexported function name
	mostMethods          = 102  // of a type
	mostFields           = 44   // of a type
)

func TestTheProductIsReadable(t *testing.T) {
	t.Parallel()
	m := readable.New()
	for _, dir := range []string{"cmd", "internal", "pkg", "resume"} {
		if err := m.AddTree(filepath.Join("..", "..", dir), false); err != nil {
			t.Fatal(err)
		}
	}

	for _, c := range []struct {
		what      string
		got, most float64
	}{
		{"functions of 15 lines or more without a blank line, percent", m.WithoutParagraph(), mostWithoutParagraph},
		{"unexported function names of one word, percent", m.OneWord(), mostOneWord},
		{"unclear wordings per 1,000 words of comment", m.Unclear(), mostUnclear},
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
		if n > most {
			t.Errorf("%d %s %s, want at most %d", n, what, strings.TrimPrefix(name, "../../"), most)
		}
	}
}
