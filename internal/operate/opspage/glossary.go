package opspage

import (
	_ "embed"
	"encoding/json"
	"fmt"
	"strings"
)

// glossaryText contains the glossary of docs/concepts.md as JSON. A test writes it.
//
//go:embed glossary.json
var glossaryText []byte

// meaning is the explanation of a term, in an element that a button shows.
type meaning struct{ ID, Term, Text string }

// loadGlossary returns the entries of the glossary in their order.
func loadGlossary() []meaning {
	var list []meaning
	if err := json.Unmarshal(glossaryText, &list); err != nil {
		// A test reads the embedded file.
		panic(err)
	}
	for i := range list {
		list[i].ID = "term-" + strings.ReplaceAll(list[i].Term, " ", "-")
	}
	return list
}

// findMeaning returns a function that returns the id of the explanation of a text: a term in any
// case, also in the plural. It returns an error if the glossary does not contain the term.
func findMeaning(glossary []meaning) func(text string) (string, error) {
	ids := map[string]string{}
	for _, m := range glossary {
		ids[m.Term] = m.ID
	}

	return func(text string) (string, error) {
		term := strings.ToLower(text)
		for _, t := range []string{term, strings.TrimSuffix(term, "s")} {
			if id := ids[t]; id != "" {
				return id, nil
			}
		}
		return "", fmt.Errorf("docs/concepts.md does not define %q", text)
	}
}
