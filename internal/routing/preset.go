package routing

import (
	"cmp"
	"maps"
	"slices"
	"strings"

	"github.com/outrelay/outrelay/internal/envelope"
	"github.com/outrelay/outrelay/internal/record"
)

// The presets.
const (
	Typed       = "typed" // the default
	Debezium    = "debezium"
	CloudEvents = "cloudevents"
	Plain       = "plain"
)

// format adds the headers of a preset to f: the part of a record in which the presets differ. It may
// replace the value of rec, which is the payload. The headers of the delivery's identity are there already.
type format func(f *Filler, v *envelope.View, m *Meta, rec *record.Record)

// newFormat returns the format of the preset called c.Name, or nil if there is no such preset.
func newFormat(c PresetConfig) format {
	switch c.Name {
	case Typed:
		// Debezium's record with an additional header for the type.
		return func(f *Filler, v *envelope.View, _ *Meta, _ *record.Record) { f.addHeader(hType, v.Type) }
	case Debezium:
		// The record of Debezium's MongoEventRouter with its defaults has no header but the id.
		return func(*Filler, *envelope.View, *Meta, *record.Record) {}
	case CloudEvents:
		return (&cloudEvents{c.Structured, []byte(c.Source)}).addTo
	case Plain:
		return addPlainHeaders
	}
	return nil
}

// PresetNames returns the names of the presets. The default is the first.
func PresetNames() []string { return []string{Typed, Debezium, CloudEvents, Plain} }

// PresetConfig configures the shape of records.
type PresetConfig struct {
	Name       string            // one of the presets; empty is Typed
	Structured bool              // CloudEvents only: the whole event as one JSON document
	Source     string            // CloudEvents source of envelopes without one; empty is /<database>/<collection>
	Headers    map[string]string // further headers: name to template; empty values are left out
}

// Preset is a validated PresetConfig. It is immutable.
type Preset struct {
	name    string // for logs
	format  format
	headers []extraHeader
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
	c.Name = cmp.Or(c.Name, Typed)
	p := &Preset{name: c.Name, format: newFormat(c)}
	bad := &InvalidError{}

	if p.format == nil {
		bad.addProblem("preset", c.Name, "expected one of "+strings.Join(PresetNames(), ", "))
	}
	if c.Structured {
		p.name += ", structured"
		if c.Name != CloudEvents {
			bad.addProblem("structured", "true", "only the cloudevents preset has a structured mode")
		}
	}

	for _, name := range slices.Sorted(maps.Keys(c.Headers)) {
		field, text := "headers."+name, c.Headers[name]
		if name == "" || name == record.HeaderID || strings.HasPrefix(name, record.ReservedPrefix) {
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
func (p *Preset) String() string { return p.name }
