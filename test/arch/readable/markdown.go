package readable

import (
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// generatedPages are written by programs from the code.
var generatedPages = []string{"docs/cli.md", "docs/configuration.md", "docs/support.md"}

// Markdown returns the sizes in bytes of the Markdown files below root that people write, by path.
func Markdown(root string) (map[string]int, error) {
	sizes := map[string]int{}
	err := fs.WalkDir(os.DirFS(root), ".", func(path string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir() && (d.Name() == "node_modules" || d.Name() == "dist" || d.Name() == ".git"):
			return fs.SkipDir
		case d.IsDir() || filepath.Ext(path) != ".md" || slices.Contains(generatedPages, path) || strings.Contains(path, "testdata/"):
			return nil
		}

		info, err := d.Info()
		if err == nil {
			sizes[path] = int(info.Size())
		}
		return err
	})
	return sizes, err
}
