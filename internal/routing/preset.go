package routing

import (
	"bytes"
	"fmt"
	"maps"
	"slices"
	"strings"
)

// The presets.
const (
	Typed       = "typed"       // as Debezium, with a header for the type of the envelope; the default
	Debezium    = "debezium"    // as Debezium's MongoEventRouter with its defaults: only the header id
	CloudEvents = "cloudevents" // binary mode with ce_ headers, or structured
	Plain       = "plain"       // every field of the envelope as a header
)

// PresetConfig configures the shape of records.
type PresetConfig struct {
	Name       string            // one of the presets; empty is Typed
	Structured bool              // CloudEvents only: the whole event as one JSON document
	Source     string            // CloudEvents source of envelopes without one; empty is /<database>/<collection>
	Headers    map[string]string // further headers: name to template; empty values are left out
}

// Preset is a validated PresetConfig. It is immutable.
type Preset struct {
	name       string
	structured bool
	source     []byte
	headers    []extraHeader
}

type extraHeader struct {
	name  []byte
	value template
	text  []byte // the value if it has no placeholder
}

// placeholders are the fields that a header of the configuration may refer to.
var placeholders = []string{
	"aggregatetype", "aggregateid", "type", "contenttype", "schemaversion", "source", "subject", "time",
}

// NewPreset validates c. Its error is an [*InvalidError] that lists every problem.
func NewPreset(c PresetConfig) (*Preset, error) {
	p := &Preset{name: c.Name, structured: c.Structured, source: []byte(c.Source)}
	bad := &InvalidError{}

	switch c.Name {
	case "":
		p.name = Typed
	case Typed, Debezium, CloudEvents, Plain:
	default:
		bad.addProblem("preset", c.Name, "expected one of typed, debezium, cloudevents, plain")
	}
	if c.Structured && p.name != CloudEvents {
		bad.addProblem("structured", "true", "only the cloudevents preset has a structured mode")
	}

	for _, name := range slices.Sorted(maps.Keys(c.Headers)) {
		field, text := "headers."+name, c.Headers[name]
		if name == "" || name == "id" || strings.HasPrefix(name, "outrelay-") {
			bad.addProblem(field, name, "the names id and outrelay-* belong to outrelay")
			continue
		}

		t, err := parseTemplate(text, placeholders...)
		if err != nil {
			bad.addProblem(field, text, err.Error())
			continue
		}

		h := extraHeader{name: []byte(name), value: t}
		if s, ok := t.staticText(); ok {
			h.text = []byte(s)
		}
		p.headers = append(p.headers, h)
	}

	if err := bad.errOrNil(); err != nil {
		return nil, err
	}
	return p, nil
}

// String returns the name of the preset.
func (p *Preset) String() string {
	if p.structured {
		return fmt.Sprintf("%s, structured", p.name)
	}
	return p.name
}

// isJSON reports whether contentType is application/json or ends with +json, apart from parameters.
func isJSON(contentType []byte) bool {
	kind, _, _ := bytes.Cut(contentType, []byte(";"))
	kind = bytes.TrimSpace(kind)
	return bytes.EqualFold(kind, jsonType) || len(kind) > 5 && bytes.EqualFold(kind[len(kind)-5:], []byte("+json"))
}
