package doctor

import (
	"fmt"
	"io"
	"strings"
)

// Print writes the report for people: a line for each check, and under those that are not ok why it matters and what
// mends it.
func (r Report) Print(w io.Writer) error {
	width := 0
	for _, c := range r.Checks {
		width = max(width, len(c.ID))
	}
	var b strings.Builder
	for _, c := range r.Checks {
		fmt.Fprintf(&b, "%-4s  %-*s  %s\n", c.Status, width, c.ID, indent(c.Detail, width+8))
		if c.Status == OK {
			continue
		}
		fmt.Fprintf(&b, "%*s  why  %s\n", width+6, "", c.Why)
		if c.Fix != "" {
			fmt.Fprintf(&b, "%*s  fix  %s\n", width+6, "", indent(c.Fix, width+13))
		}
	}
	fmt.Fprintf(&b, "%d ok, %d warnings, %d failed\n", r.Count(OK), r.Count(Warn), r.Count(Fail))
	_, err := io.WriteString(w, b.String())
	return err
}

// indent puts the lines after the first under it.
func indent(text string, by int) string {
	return strings.ReplaceAll(text, "\n", "\n"+strings.Repeat(" ", by))
}

// few is a list for a sentence: at most n items and how many more there are.
func few(items []string, n int) string {
	if len(items) <= n {
		return strings.Join(items, ", ")
	}
	return fmt.Sprintf("%s and %d more", strings.Join(items[:n], ", "), len(items)-n)
}

// lines is a list of statements, at most n and how many more there are.
func lines(items []string, n int) string {
	if len(items) <= n {
		return strings.Join(items, "\n")
	}
	return fmt.Sprintf("%s\n… and %d more like these", strings.Join(items[:n], "\n"), len(items)-n)
}
