package opspage

import (
	"iter"
	"net/url"
	"slices"
	"strings"
	"testing"

	"golang.org/x/net/html"
)

// elements returns the elements of a kind below a node.
func elements(node *html.Node, kind string) iter.Seq[*html.Node] {
	return func(yield func(*html.Node) bool) {
		for below := range node.Descendants() {
			if below.Type == html.ElementNode && below.Data == kind && !yield(below) {
				return
			}
		}
	}
}

// countElements returns the number of elements of a kind below a node.
func countElements(node *html.Node, kind string) int {
	return len(slices.Collect(elements(node, kind)))
}

// readText returns the text below a node.
func readText(node *html.Node) string {
	var text strings.Builder
	for below := range node.Descendants() {
		if below.Type == html.TextNode {
			text.WriteString(below.Data)
		}
	}
	return strings.TrimSpace(text.String())
}

// hasContent reports whether a cell shows something. The first cell of a row names its entry.
func hasContent(cell *html.Node) bool {
	text := readText(cell)
	return cell.Data == "th" || text != "" && text != "–" || countElements(cell, "input")+countElements(cell, "svg") > 0
}

// findEmptyColumns returns the heads of the columns of a document that have no content in any row.
func findEmptyColumns(t *testing.T, body string) (heads []string) {
	t.Helper()
	document, err := html.Parse(strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}

	for table := range elements(document, "table") {
		filled := map[int]bool{}
		for rows := range elements(table, "tbody") {
			for row := range elements(rows, "tr") {
				column := 0
				for cell := range row.ChildNodes() {
					if cell.Type == html.ElementNode {
						filled[column] = filled[column] || hasContent(cell)
						column++
					}
				}
			}
		}
		// A table whose rows the script writes has none.
		if len(filled) == 0 {
			continue
		}
		for rows := range elements(table, "thead") {
			for column, head := range slices.Collect(elements(rows, "th")) {
				if !filled[column] {
					heads = append(heads, readText(head))
				}
			}
		}
	}
	return heads
}

// required are the columns of texts that each entry has, and the boxes and buttons of the entries that have an action.
var required = []string{
	"", "Actions", "Aggregate", "Class", "Client", "Collection", "Database", "Error", "Host", "Ids", "Key", "Phase", "Place in Kafka", "Reason", "State",
	"Topic", "Type", "Version",
}

// Entries without their optional texts leave no column empty, on any page.
func TestNoPageHasAnEmptyColumn(t *testing.T) {
	t.Parallel()
	site := newSite(&desk{})
	tables := 0

	for _, at := range allAddresses() {
		at = strings.ReplaceAll(at, url.QueryEscape(hostile), "x")
		_, body := sendRequest(t, site, &operator, "GET", at, nil)
		tables += strings.Count(body, "<table")
		heads := slices.DeleteFunc(findEmptyColumns(t, body), func(head string) bool { return slices.Contains(required, head) })
		if len(heads) > 0 {
			t.Errorf("%s: columns without a value: %q", at, heads)
		}
	}
	if tables < 25 {
		t.Errorf("the pages have %d tables", tables)
	}
}
