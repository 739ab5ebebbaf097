package pages

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// goName is a name of a public package in the text of a page, such as `consumer.WithRetry`.
var goName = regexp.MustCompile("`(?:[^`\n]*[^a-zA-Z0-9_`\n.])?(consumer|deadletter|entity|event|inbox|outbox|outboxtest|relay|saga|servertest)\\.([A-Z]\\w+)")

// Each name of a public package in the text of the documentation exists.
func TestPagesNameTheAPI(t *testing.T) {
	t.Parallel()
	exported := readAPI(t)
	count := 0

	for file, text := range readPages(t) {
		for _, name := range goName.FindAllStringSubmatch(text, -1) {
			count++
			if !exported[name[1]+"."+name[2]] {
				t.Errorf("%s names %s.%s, which does not exist", filepath.Base(file), name[1], name[2])
			}
		}
	}
	if count < 80 {
		t.Errorf("only %d names were found", count)
	}
}

// readPages returns the text of the README and of each page, by file.
func readPages(t *testing.T) map[string]string {
	t.Helper()
	pages := map[string]string{}
	for _, pattern := range []string{"../../../README.md", "../../../docs/*.md", "../../../docs/*/*.md"} {
		files, err := filepath.Glob(pattern)
		if err != nil {
			t.Fatal(err)
		}

		for _, file := range files {
			text, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			pages[file] = string(text)
		}
	}
	return pages
}

// readAPI returns the exported names of the public packages from their listings.
func readAPI(t *testing.T) map[string]bool {
	t.Helper()
	files, err := filepath.Glob("../../arch/api/*.txt")
	if err != nil || len(files) == 0 {
		t.Fatalf("no listings: %v", err)
	}

	exported := map[string]bool{}
	declared := regexp.MustCompile(`(?m)^(?:func (?:\([^)]*\) )?|value )?([A-Z]\w*)`)
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		name := strings.TrimSuffix(filepath.Base(file), ".txt")
		for _, match := range declared.FindAllStringSubmatch(string(text), -1) {
			exported[name[strings.LastIndexByte(name, '_')+1:]+"."+match[1]] = true
		}
	}
	return exported
}
