package arch

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// TestSnippetsOfTheGuideAreCompiled: every line of Go in docs/consumers.md stands in an example, which the compiler checks. Lines
// with an ellipsis leave something to the reader.
func TestSnippetsOfTheGuideAreCompiled(t *testing.T) {
	t.Parallel()
	read := func(path string) string {
		text, err := os.ReadFile(filepath.Join("..", "..", path))
		if err != nil {
			t.Fatal(err)
		}
		return string(text)
	}
	compiled := map[string]bool{}
	for line := range strings.Lines(read("pkg/consumer/example_guide_test.go")) {
		compiled[strings.TrimSpace(line)] = true
	}

	blocks := regexp.MustCompile("(?ms)^```go\n(.*?)^```").FindAllStringSubmatch(read("docs/consumers.md"), -1)
	if len(blocks) < 4 {
		t.Fatalf("%d snippets were found", len(blocks))
	}
	for _, block := range blocks {
		for line := range strings.Lines(block[1]) {
			line, _, _ = strings.Cut(line, " // ")
			if line = strings.TrimSpace(line); line != "" && !strings.Contains(line, "…") && !compiled[line] {
				t.Errorf("docs/consumers.md: no example has the line: %s", line)
			}
		}
	}
}

// TestTheDesignTakesTwentyMinutes: the text of DESIGN.md up to the rules, without tables and code, has at most 4,000 words. That
// takes 20 minutes at 200 words per minute. Details belong to the documentation of a package.
func TestTheDesignTakesTwentyMinutes(t *testing.T) {
	t.Parallel()
	const most = 20 * 200
	text, err := os.ReadFile(filepath.Join("..", "..", "DESIGN.md"))
	if err != nil {
		t.Fatal(err)
	}
	before, _, found := strings.Cut(string(text), "\n## The rules\n")
	if !found {
		t.Fatal("DESIGN.md has no section The rules")
	}

	words := 0
	for line := range strings.Lines(regexp.MustCompile("(?ms)^```.*?^```").ReplaceAllString(before, "")) {
		if !strings.HasPrefix(line, "|") {
			words += len(strings.Fields(line))
		}
	}
	if words < 1000 || words > most {
		t.Errorf("%d words before the rules, want at most %d", words, most)
	}
}
