package readable

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

// generatedPages are written by programs from the code.
var generatedPages = []string{"docs/cli.md", "docs/configuration.md", "docs/support.md"}

// generatedBlock is a part of a page that is written like generatedPages: up to its end, or up to the next chapter.
var generatedBlock = regexp.MustCompile(`(?s)<!-- generated: .*?<!-- end -->|<!-- from docs/.*?\n## `)

// Markdown returns the sizes in bytes of the Markdown files below root that people write, by path.
func Markdown(root string) (map[string]int, error) {
	sizes := map[string]int{}
	err := fs.WalkDir(os.DirFS(root), ".", func(path string, entry fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case entry.IsDir() && (entry.Name() == "node_modules" || entry.Name() == "dist" || entry.Name() == ".git"):
			return fs.SkipDir
		case entry.IsDir() || filepath.Ext(path) != ".md" || slices.Contains(generatedPages, path) || strings.Contains(path, "testdata/"):
			return nil
		}

		text, err := os.ReadFile(filepath.Join(root, path))
		sizes[path] = len(generatedBlock.ReplaceAll(text, nil))
		return err
	})
	return sizes, err
}
