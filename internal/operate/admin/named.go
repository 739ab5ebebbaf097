package admin

import (
	"slices"

	"github.com/outrelay/outrelay/internal/relay/stored/letters"
)

// findMissing returns those of the named ids and rows that no entry of a list has. list returns a page of the entries that the filter of the
// ids matches, and namesOf the ids and the row of an entry.
func findMissing[T any](named []string, list func(after string) (Page[T], error), namesOf func(entry *T) []string) ([]string, error) {
	if len(named) == 0 {
		return nil, nil
	}

	found := map[string]bool{}
	for after, more := "", true; more; more = after != "" {
		page, err := list(after)
		if err != nil {
			return nil, err
		}
		for i := range page.Items {
			for _, name := range namesOf(&page.Items[i]) {
				found[name] = true
			}
		}
		after = page.Next
	}
	return withoutNames(named, found), nil
}

// withoutNames returns the ids and rows that found does not have in any form.
func withoutNames(named []string, found map[string]bool) []string {
	isFound := func(form string) bool { return found[form] }
	return slices.DeleteFunc(slices.Clone(named), func(text string) bool { return slices.ContainsFunc(formsOf(text), isFound) })
}

// formsOf returns the texts by which lists may show the id that an operator has typed: a UUID may be typed in capitals, and letters store
// the digest of a long id.
func formsOf(text string) []string {
	forms := []string{text}
	for _, id := range parseIDs(text) {
		forms = append(forms, id.String())
	}
	// A text that stands for no value was rejected before.
	values, _ := parseIDValues(text)
	for _, value := range values {
		forms = append(forms, letters.IDText(value), letters.IDText(letters.ShortID(value)))
	}
	return forms
}
