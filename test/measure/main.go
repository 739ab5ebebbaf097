// Measure prints how readable the code is, in figures that can be compared with other projects and between two versions.
//
//	go run ./test/measure [-tests] [-list] [DIR]...
//
// Without directories it measures cmd, internal, pkg and resume. With -tests it measures the test files instead of the product.
// With -list it also prints each place that counts against a figure: long functions without a paragraph, names that are defined
// too often, large types, and comments with words that the writing guide in CONTRIBUTING.md rules out.
//
// The figures are a thermometer. Squeezing code until a figure is met (blank lines without a thought between them, one function
// cut into five, longer names that say no more) makes the code worse and the figure worthless.
package main

import (
	"flag"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

func main() {
	tests := flag.Bool("tests", false, "measure the test files")
	list := flag.Bool("list", false, "print the places that count against a figure")
	flag.Parse()
	dirs := flag.Args()
	if len(dirs) == 0 {
		dirs = []string{"cmd", "internal", "pkg", "resume"}
	}

	m := newMeasure()
	for _, dir := range dirs {
		if err := m.addTree(filepath.Clean(strings.TrimSuffix(dir, "/...")), *tests); err != nil {
			fmt.Fprintln(os.Stderr, "measure:", err)
			os.Exit(1)
		}
	}
	m.finish()

	m.printFigures(os.Stdout)
	if *list {
		slices.Sort(m.places)
		for _, place := range m.places {
			fmt.Println(place)
		}
	}
}

// addTree adds the Go files below dir: the product's, or the tests'.
func (m *measure) addTree(dir string, tests bool) error {
	return filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() && (d.Name() == "testdata" || d.Name() == "node_modules") {
			return filepath.SkipDir
		}
		if d.IsDir() || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") != tests {
			return nil
		}
		return m.addFile(path)
	})
}
