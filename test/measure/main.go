// Measure prints how readable the code is, how the module is divided, and the size of the Markdown that people write.
//
//	go run ./test/measure [-tests] [-list] [-without DIRS] [DIR]...
//
// Without directories it measures cmd, internal, pkg and resume. With -tests it measures the test files instead of the product.
// With -list it also prints each place that counts against a figure. The directories of -without are tools: they do not count as lines of
// the product.
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
	without := flag.String("without", "internal/lab", "the directories of tools, separated by commas")
	flag.Parse()
	dirs := flag.Args()
	if len(dirs) == 0 {
		dirs = []string{"cmd", "internal", "pkg", "resume"}
	}

	measure := readable.New()
	for _, dir := range dirs {
		if err := measure.AddTree(filepath.Clean(strings.TrimSuffix(dir, "/...")), *tests); err != nil {
			fmt.Fprintln(os.Stderr, "measure:", err)
			os.Exit(1)
		}
	}

	measure.Print(os.Stdout)
	house, err := measureHouse(".", strings.Split(*without, ","))
	if err != nil {
		fmt.Fprintln(os.Stderr, "measure:", err)
		os.Exit(1)
	}
	house.print(os.Stdout)
	pages, err := readable.Markdown(".")
	if err != nil {
		fmt.Fprintln(os.Stderr, "measure:", err)
		os.Exit(1)
	}
	total := 0
	for _, size := range pages {
		total += size
	}
	fmt.Printf("%-52s %.0f in %d files\n", "Markdown that people write, KB", float64(total)/1000, len(pages))
	if *list {
		for _, place := range append(measure.Places(), house.single()...) {
			fmt.Println(place)
		}
	}
}
