package arch

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/outrelay/outrelay/test/arch/readable"
)

// TestSnippetsOfTheGuideAreCompiled: every line of Go in docs/consumers.md, and of the scheduled events in docs/services.md, stands in an
// example, which the compiler checks. Lines with an ellipsis leave something to the reader.
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
	for _, example := range []string{"pkg/consumer/example_guide_test.go", "examples/shipping/main.go", "pkg/entity/example_guide_test.go"} {
		for line := range strings.Lines(read(example)) {
			line, _, _ = strings.Cut(line, " // ")
			compiled[strings.TrimSpace(line)] = true
		}
	}

	snippet := regexp.MustCompile("(?ms)^```go\n(.*?)^```")
	blocks := snippet.FindAllStringSubmatch(read("docs/consumers.md"), -1)
	scheduled := slices.DeleteFunc(snippet.FindAllStringSubmatch(read("docs/services.md"), -1), func(block []string) bool {
		return !strings.Contains(block[1], "box.ScheduleIn(")
	})
	if len(blocks) < 4 || len(scheduled) != 1 {
		t.Fatalf("%d snippets and %d with a scheduled event were found", len(blocks), len(scheduled))
	}
	for _, block := range append(blocks, scheduled...) {
		for line := range strings.Lines(block[1]) {
			line, _, _ = strings.Cut(line, " // ")
			if line = strings.TrimSpace(line); !strings.HasPrefix(line, "//") && line != "" && !strings.Contains(line, "…") && !compiled[line] {
				t.Errorf("no example has the line: %s", line)
			}
		}
	}
}

// TestDocumentsStayShort: DESIGN.md takes 20 minutes, the changelog states what a version does, and docs/faults.md is no diary. What
// does not fit belongs to the documentation of a package, or to the history of the repository.
func TestDocumentsStayShort(t *testing.T) {
	t.Parallel()
	for path, most := range map[string]int{"DESIGN.md": 20_000, "CHANGELOG.md": 6_000, "docs/faults.md": 15_000} {
		info, err := os.Stat(filepath.Join("..", "..", path))
		if err != nil {
			t.Fatal(err)
		}
		if info.Size() > int64(most) {
			t.Errorf("%s has %d bytes, want at most %d", path, info.Size(), most)
		}
	}

	pages, err := readable.Markdown(filepath.Join("..", ".."))
	if err != nil {
		t.Fatal(err)
	}
	total := 0
	for _, size := range pages {
		total += size
	}
	if total > mostMarkdown*1000 {
		t.Errorf("people write %d KB of Markdown, want at most %d: `go run ./test/measure` counts it", total/1000, mostMarkdown)
	}
}
