package routing

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/outrelay/outrelay/internal/envelope"
)

// templatePart is a literal or the name of a placeholder.
type templatePart struct {
	literal     string
	placeholder string
}

type template []templatePart

// parseTemplate splits s at its {placeholders}. Only the names in known are allowed.
func parseTemplate(s string, known ...string) (template, error) {
	var t template
	for s != "" {
		before, rest, open := strings.Cut(s, "{")
		if strings.Contains(before, "}") {
			return nil, fmt.Errorf("a } without a {")
		}
		if before != "" {
			t = append(t, templatePart{literal: before})
		}
		if !open {
			break
		}

		name, after, closed := strings.Cut(rest, "}")
		if !closed {
			return nil, fmt.Errorf("a { without a }")
		}
		if !slices.Contains(known, name) {
			return nil, fmt.Errorf("{%s} is unknown; known are {%s}", name, strings.Join(known, "}, {"))
		}

		t = append(t, templatePart{placeholder: name})
		s = after
	}
	return t, nil
}

// uses reports whether t has the placeholder.
func (t template) uses(placeholder string) bool {
	return slices.Contains(t, templatePart{placeholder: placeholder})
}

// staticText returns the text of a template without placeholders. ok is false if it has any.
func (t template) staticText() (text string, ok bool) {
	var b strings.Builder
	for _, p := range t {
		if p.placeholder != "" {
			return "", false
		}
		b.WriteString(p.literal)
	}
	return b.String(), true
}

// appendTo appends the template, filled with the fields of v.
func (t template) appendTo(dst []byte, v *envelope.View) []byte {
	for _, p := range t {
		switch p.placeholder {
		case "":
			dst = append(dst, p.literal...)
		case "aggregatetype":
			dst = append(dst, v.AggregateType...)
		case "aggregateid":
			dst = append(dst, v.AggregateID...)
		case "type":
			dst = append(dst, v.Type...)
		case "contenttype":
			dst = append(dst, v.ContentType...)
		case "schemaversion":
			dst = append(dst, v.SchemaVersion...)
		case "source":
			dst = append(dst, v.Source...)
		case "subject":
			dst = append(dst, v.Subject...)
		case "time":
			if v.HasTime {
				dst = appendTime(dst, v.Time)
			}
		}
	}
	return dst
}

// appendTime appends Unix milliseconds in the format of RFC 3339.
func appendTime(dst []byte, ms int64) []byte {
	return time.UnixMilli(ms).UTC().AppendFormat(dst, "2006-01-02T15:04:05.000Z07:00")
}
