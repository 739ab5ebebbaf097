// Measure prints how readable the code is.
//
//	go run ./test/measure [-tests] [-list] [DIR]...
//
// Without directories it measures cmd, internal, pkg and resume. With -tests it measures the test files instead of the product.
// With -list it also prints each place that counts against a figure.
package main

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/outrelay/outrelay/test/arch/readable"
)

func main() {
	tests := flag.Bool("tests", false, "measure the test files")
	list := flag.Bool("list", false, "print the places that count against a figure")
	flag.Parse()
	dirs := flag.Args()
	if len(dirs) == 0 {
		dirs = []string{"cmd", "internal", "pkg", "resume"}
	}

	m := readable.New()
	for _, dir := range dirs {
		if err := m.AddTree(filepath.Clean(strings.TrimSuffix(dir, "/...")), *tests); err != nil {
			fmt.Fprintln(os.Stderr, "measure:", err)
			os.Exit(1)
		}
	}

	m.Print(os.Stdout)
	if *list {
		for _, place := range m.Places() {
			fmt.Println(place)
		}
	}
}
