package doctor

import (
	"fmt"
	"io"
	"strings"
)

// Print writes the report for people: a line for each check, and for each check that is not ok also
// the reason and the fix.
func (r Report) Print(out io.Writer) error {
	width := 0
	unchecked := 0
	// A check that was not run belongs to the failure that prevented it.
	blocked := map[string][]string{}
	for _, c := range r.Checks {
		width = max(width, len(c.ID))
		if c.isBlocked() {
			unchecked++
			blocked[c.root] = append(blocked[c.root], c.ID)
		}
	}

	var builder strings.Builder
	for _, c := range r.Checks {
		// One failure is printed once, with the checks that it prevents.
		if c.isBlocked() {
			continue
		}
		fmt.Fprintf(&builder, "%-4s  %-*s  %s\n", c.Status, width, c.ID, indentLines(c.Detail, width+8))
		if c.Status == OK {
			continue
		}

		fmt.Fprintf(&builder, "%*s  why  %s\n", width+6, "", c.Why)
		if c.Fix != "" {
			fmt.Fprintf(&builder, "%*s  fix  %s\n", width+6, "", indentLines(c.Fix, width+13))
		}
		if ids := blocked[c.ID]; len(ids) > 0 {
			fmt.Fprintf(&builder, "%*s  not checked: %s\n", width+6, "", indentLines(wrapList(ids), width+21))
		}
	}
	warnings := "warnings"
	if r.Count(Warn)-unchecked == 1 {
		warnings = "warning"
	}
	fmt.Fprintf(&builder, "%d ok, %d %s, %d failed", r.Count(OK), r.Count(Warn)-unchecked, warnings, r.Count(Fail))
	if unchecked > 0 {
		fmt.Fprintf(&builder, ", %d not checked", unchecked)
	}
	builder.WriteString("\n")
	_, err := io.WriteString(out, builder.String())
	return err
}

// listWidth is where wrapList begins a new line.
const listWidth = 90

// wrapList joins items with commas, in lines of about listWidth bytes.
func wrapList(items []string) string {
	var builder strings.Builder
	began := 0 // of the line
	for i, item := range items {
		switch {
		case i == 0:
		case builder.Len()-began+len(item) > listWidth:
			builder.WriteString(",\n")
			began = builder.Len()
		default:
			builder.WriteString(", ")
		}
		builder.WriteString(item)
	}
	return builder.String()
}

// indentLines indents all lines after the first.
func indentLines(text string, width int) string {
	return strings.ReplaceAll(text, "\n", "\n"+strings.Repeat(" ", width))
}

// joinFew joins at most n items for a sentence, with the number of the others.
func joinFew(items []string, n int) string {
	if len(items) <= n {
		return strings.Join(items, ", ")
	}
	return fmt.Sprintf("%s and %d more", strings.Join(items[:n], ", "), len(items)-n)
}

// joinLines joins at most n statements, with the number of the others.
func joinLines(items []string, n int) string {
	if len(items) <= n {
		return strings.Join(items, "\n")
	}
	return fmt.Sprintf("%s\n… and %d more like these", strings.Join(items[:n], "\n"), len(items)-n)
}
