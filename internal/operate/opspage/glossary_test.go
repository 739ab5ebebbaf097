package opspage

import (
	"encoding/json"
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/outrelay/outrelay/test/generated"
)

// readGlossary returns the entries of the tables below "## Glossary" in docs/concepts.md, one for each term.
func readGlossary(t *testing.T) []meaning {
	t.Helper()
	text, err := os.ReadFile("../../../docs/concepts.md")
	if err != nil {
		t.Fatal(err)
	}
	_, after, _ := strings.Cut(string(text), "## Glossary")
	section, _, _ := strings.Cut(after, "\n## ")

	var list []meaning
	links := regexp.MustCompile(`\[([^\]]+)\]\([^)]+\)`)
	for line := range strings.Lines(section) {
		cells := strings.Split(strings.Trim(strings.TrimSpace(line), "|"), " | ")
		if len(cells) != 2 || strings.TrimSpace(cells[0]) == "term" {
			continue
		}
		explanation := strings.NewReplacer("`", "", "**", "").Replace(links.ReplaceAllString(strings.TrimSpace(cells[1]), "$1"))
		for term := range strings.SplitSeq(strings.TrimSpace(cells[0]), ", ") {
			list = append(list, meaning{Term: term, Text: explanation})
		}
	}
	return list
}

// The page explains terms in the words of docs/concepts.md, their only home.
func TestGlossaryIsThatOfTheConcepts(t *testing.T) {
	t.Parallel()
	var b strings.Builder
	b.WriteString("[\n")
	list := readGlossary(t)
	for i, m := range list {
		line, err := json.Marshal(struct {
			Term string `json:"term"`
			Text string `json:"text"`
		}{m.Term, m.Text})
		if err != nil {
			t.Fatal(err)
		}
		b.Write(line)
		if i < len(list)-1 {
			b.WriteByte(',')
		}
		b.WriteByte('\n')
	}
	b.WriteString("]\n")

	generated.Check(t, "internal/operate/opspage/glossary.json", b.String())
	if len(list) < 30 {
		t.Errorf("docs/concepts.md has only %d terms", len(list))
	}
}

// Each term that a template explains has an entry, also in parts that the other tests do not show.
func TestEachTermHasAnEntry(t *testing.T) {
	t.Parallel()
	find := findMeaning(loadGlossary())
	entries, err := files.ReadDir("templates")
	if err != nil {
		t.Fatal(err)
	}
	used := regexp.MustCompile(`template "(?:term|help)" "([^"]+)"`)
	n := 0
	for _, e := range entries {
		text, err := files.ReadFile("templates/" + e.Name())
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range used.FindAllStringSubmatch(string(text), -1) {
			n++
			if _, err := find(m[1]); err != nil {
				t.Errorf("%s: %v", e.Name(), err)
			}
		}
	}
	if n < 15 {
		t.Errorf("the templates explain %d terms", n)
	}

	for _, tile := range (&overview{}).Tiles(&view{}) {
		if _, err := find(tile.Term); err != nil {
			t.Error(err)
		}
	}
	if _, err := find("ticket"); err == nil {
		t.Error("a term without an entry is accepted")
	}
}
