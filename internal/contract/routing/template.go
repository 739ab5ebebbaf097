package routing

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/outrelay/outrelay/internal/contract/envelope"
)

// templatePart is a literal or a placeholder.
type templatePart struct {
	literal string
	placeholder
}

// placeholder is a value of an envelope that a template refers to. The zero value is none.
type placeholder struct {
	kind string // such as aggregatetype, database, header or field
	name string // of the header or of the field
}

// The kinds of placeholders whose value is not in every envelope.
const (
	kindDatabase   = "database"
	kindCollection = "collection"
	kindHeader     = "header"
	kindField      = "field"
)

// topicPlaceholders are the placeholders of a topic.
var topicPlaceholders = []string{"aggregatetype", "type", kindDatabase, kindCollection, kindHeader, kindField}

type template []templatePart

// parseTemplate splits s at its {placeholders}. Only the kinds in known are allowed, and only parts of the envelope that
// the mapping has.
func parseTemplate(s string, m *envelope.Mapping, known ...string) (template, error) {
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
		p, err := parsePlaceholder(name, m, known)
		if err != nil {
			return nil, err
		}
		t = append(t, templatePart{placeholder: p})
		s = after
	}
	return t, nil
}

// parsePlaceholder parses the text between the braces.
func parsePlaceholder(text string, m *envelope.Mapping, known []string) (placeholder, error) {
	kind, name, hasName := strings.Cut(text, ":")
	named := kind == kindHeader || kind == kindField
	if !slices.Contains(known, kind) || hasName != named {
		shown := slices.Clone(known)
		for i, k := range shown {
			if k == kindHeader || k == kindField {
				shown[i] += ":x"
			}
		}
		return placeholder{}, fmt.Errorf("{%s} is unknown; known are {%s}", text, strings.Join(shown, "}, {"))
	}

	switch {
	case kind == kindHeader && name == "":
		return placeholder{}, fmt.Errorf("{header:} names no header")
	case kind == kindHeader && !m.Has("headers"):
		return placeholder{}, fmt.Errorf("by the mapping, the documents have no headers")
	case kind == kindField:
		if reason := m.FieldProblem(name); reason != "" {
			return placeholder{}, fmt.Errorf("{%s}: %s", text, reason)
		}
	case !named && kind != kindDatabase && kind != kindCollection && !m.Has(kind):
		return placeholder{}, fmt.Errorf("by the mapping, the documents have no %s", kind)
	}
	return placeholder{kind, name}, nil
}

// listPlaceholders returns the placeholders of t.
func (t template) listPlaceholders() []placeholder {
	var list []placeholder
	for _, p := range t {
		if p.kind != "" {
			list = append(list, p.placeholder)
		}
	}
	return list
}

// staticText returns the text of a template without placeholders. ok is false if it has any.
func (t template) staticText() (text string, ok bool) {
	var b strings.Builder
	for _, p := range t {
		if p.kind != "" {
			return "", false
		}
		b.WriteString(p.literal)
	}
	return b.String(), true
}

// appendTo appends the template, filled with the values of v. Values that are not found are left out, and worst is the
// highest finding.
func (t template) appendTo(dst []byte, v *envelope.View, m *Meta) (_ []byte, worst envelope.Finding) {
	for _, p := range t {
		if p.kind == "" {
			dst = append(dst, p.literal...)
			continue
		}
		var finding envelope.Finding
		dst, finding = p.appendTo(dst, v, m)
		worst = max(worst, finding)
	}
	return dst, worst
}

// findProblem returns why a value of the template was not found, or "". Findings below from count as found.
func (t template) findProblem(v *envelope.View, m *Meta, from envelope.Finding) string {
	for _, p := range t.listPlaceholders() {
		text, finding := p.appendTo(nil, v, m)

		// An empty text would name another topic. In a header it has no such effect.
		if finding == envelope.Found && from == envelope.Missing && p.name != "" && len(text) == 0 {
			return p.kind + " " + p.name + " is empty"
		}
		if finding < from {
			continue
		}

		switch {
		case p.kind == kindField:
			return v.DescribeField(p.name, finding)
		case finding == envelope.TooLong:
			return fmt.Sprintf("header %s is too long; at most %d bytes are allowed", p.name, envelope.MaxFieldText)
		default:
			return "header " + p.name + " is missing"
		}
	}
	return ""
}

// appendTo appends the value of the placeholder, if it is found. An optional part of the envelope may be empty.
func (p placeholder) appendTo(dst []byte, v *envelope.View, m *Meta) ([]byte, envelope.Finding) {
	switch p.kind {
	case kindField:
		return v.AppendField(dst, p.name)
	case kindHeader:
		return v.AppendHeader(dst, p.name)

	// m is nil if the caller has an envelope without its place.
	case kindDatabase:
		if m != nil {
			dst = append(dst, m.DB...)
		}
	case kindCollection:
		if m != nil {
			dst = append(dst, m.Coll...)
		}

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
	return dst, envelope.Found
}

// appendTime appends Unix milliseconds in the format of RFC 3339.
func appendTime(dst []byte, ms int64) []byte {
	return time.UnixMilli(ms).UTC().AppendFormat(dst, "2006-01-02T15:04:05.000Z07:00")
}
