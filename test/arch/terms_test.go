package arch

import (
	"io/fs"
	"os"
	"slices"
	"strings"
	"testing"
)

// oneTerm maps other spellings of a term to the term that code, metrics, commands and documentation
// use.
var oneTerm = map[string]string{"take" + "-over": "takeover", "time" + "-out": "timeout"}

func TestATermHasOneSpelling(t *testing.T) {
	t.Parallel()
	root := os.DirFS("../..")
	read := 0

	err := fs.WalkDir(root, ".", func(path string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir() && path != "." && (strings.HasPrefix(d.Name(), ".") || d.Name() == "node_modules"):
			return fs.SkipDir
		case d.IsDir() || !slices.ContainsFunc([]string{".go", ".md", ".json", ".yaml", ".html"}, func(end string) bool { return strings.HasSuffix(path, end) }):
			return nil
		}

		read++
		text, err := fs.ReadFile(root, path)
		for other, term := range oneTerm {
			if strings.Contains(strings.ToLower(string(text)), other) {
				t.Errorf("%s contains %q: write %q", path, other, term)
			}
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	if read < 1000 {
		t.Errorf("read %d files, want all files of the module", read)
	}
}
