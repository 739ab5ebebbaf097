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

// parseTemplate splits text at its {placeholders}. Only the kinds in known are allowed, and only parts of the envelope that
// the mapping has.
func parseTemplate(text string, mapping *envelope.Mapping, known ...string) (template, error) {
	var template template
	for text != "" {
		before, rest, open := strings.Cut(text, "{")
		if strings.Contains(before, "}") {
			return nil, fmt.Errorf("a } without a {")
		}
		if before != "" {
			template = append(template, templatePart{literal: before})
		}
		if !open {
			break
		}

		name, after, closed := strings.Cut(rest, "}")
		if !closed {
			return nil, fmt.Errorf("a { without a }")
		}
		placeholder, err := parsePlaceholder(name, mapping, known)
		if err != nil {
			return nil, err
		}
		template = append(template, templatePart{placeholder: placeholder})
		text = after
	}
	return template, nil
}

// parsePlaceholder parses the text between the braces.
func parsePlaceholder(text string, mapping *envelope.Mapping, known []string) (placeholder, error) {
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
	case kind == kindHeader && !mapping.Has("headers"):
		return placeholder{}, fmt.Errorf("by the mapping, the documents have no headers")
	case kind == kindField:
		if reason := mapping.FieldProblem(name); reason != "" {
			return placeholder{}, fmt.Errorf("{%s}: %s", text, reason)
		}
	case !named && kind != kindDatabase && kind != kindCollection && !mapping.Has(kind):
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
	var builder strings.Builder
	for _, p := range t {
		if p.kind != "" {
			return "", false
		}
		builder.WriteString(p.literal)
	}
	return builder.String(), true
}

// appendTo appends the template, filled with the values of view. Values that are not found are left out, and worst is the
// highest finding.
func (t template) appendTo(dst []byte, view *envelope.View, meta *Meta) (_ []byte, worst envelope.Finding) {
	for _, p := range t {
		if p.kind == "" {
			dst = append(dst, p.literal...)
			continue
		}
		var finding envelope.Finding
		dst, finding = p.appendTo(dst, view, meta)
		worst = max(worst, finding)
	}
	return dst, worst
}

// findProblem returns why a value of the template was not found, or "". Findings below lowest count as found.
func (t template) findProblem(view *envelope.View, meta *Meta, lowest envelope.Finding) string {
	for _, p := range t.listPlaceholders() {
		text, finding := p.appendTo(nil, view, meta)

		// An empty text would name another topic. In a header it has no such effect.
		if finding == envelope.Found && lowest == envelope.Missing && p.name != "" && len(text) == 0 {
			return p.kind + " " + p.name + " is empty"
		}
		if finding < lowest {
			continue
		}

		switch {
		case p.kind == kindField:
			return view.DescribeField(p.name, finding)
		case finding == envelope.TooLong:
			return fmt.Sprintf("header %s is too long; at most %d bytes are allowed", p.name, envelope.MaxFieldText)
		default:
			return "header " + p.name + " is missing"
		}
	}
	return ""
}

// appendTo appends the value of the placeholder, if it is found. An optional part of the envelope may be empty.
func (p placeholder) appendTo(dst []byte, view *envelope.View, meta *Meta) ([]byte, envelope.Finding) {
	switch p.kind {
	case kindField:
		return view.AppendField(dst, p.name)
	case kindHeader:
		return view.AppendHeader(dst, p.name)

	// meta is nil if the caller has an envelope without its place.
	case kindDatabase:
		if meta != nil {
			dst = append(dst, meta.DB...)
		}
	case kindCollection:
		if meta != nil {
			dst = append(dst, meta.Coll...)
		}

	case "aggregatetype":
		dst = append(dst, view.AggregateType...)
	case "aggregateid":
		dst = append(dst, view.AggregateID...)
	case "type":
		dst = append(dst, view.Type...)
	case "contenttype":
		dst = append(dst, view.ContentType...)
	case "schemaversion":
		dst = append(dst, view.SchemaVersion...)
	case "source":
		dst = append(dst, view.Source...)
	case "subject":
		dst = append(dst, view.Subject...)
	case "time":
		if view.HasTime {
			dst = appendTime(dst, view.Time)
		}
	}
	return dst, envelope.Found
}

// appendTime appends Unix milliseconds in the format of RFC 3339.
func appendTime(dst []byte, ms int64) []byte {
	return time.UnixMilli(ms).UTC().AppendFormat(dst, "2006-01-02T15:04:05.000Z07:00")
}
