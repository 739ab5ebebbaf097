package main

import (
	"io"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

var example = regexp.MustCompile(`(?m)^\s*\$ (?:outrelay|go run \./cmd/outrelay)((?: [^#\n&]*)?)`)

// The program accepts each command line in the documents.
func TestDocumentsNameCommandsThatExist(t *testing.T) {
	t.Parallel()
	var files []string
	for _, pattern := range []string{"../../*.md", "../../docs/*.md", "../../docs/*/*.md"} {
		found, err := filepath.Glob(pattern)
		if err != nil {
			t.Fatal(err)
		}
		files = append(files, found...)
	}

	n := 0
	for _, name := range files {
		text, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}

		for _, m := range example.FindAllStringSubmatch(string(text), -1) {
			n++
			p := &program{in: strings.NewReader(""), out: io.Discard, errOut: io.Discard}
			line, _, _ := strings.Cut(strings.ReplaceAll(m[1], "ID...", "ID"), " > ") // into a file
			c, rest, err := newRootCommand(p).Find(strings.Fields(line))
			if err == nil {
				if err = c.ParseFlags(rest); err == nil {
					err = c.ValidateArgs(c.Flags().Args())
				}
			}
			if err != nil {
				t.Errorf("%s: outrelay%s: %v", filepath.Base(name), m[1], err)
			}
		}
	}

	if n < 30 {
		t.Errorf("only %d command lines were found", n)
	}
}
