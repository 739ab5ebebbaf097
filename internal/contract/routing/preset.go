package routing

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/outrelay/outrelay/internal/contract/envelope"
	"github.com/outrelay/outrelay/internal/contract/record"
)

// The ways to write documents as JSON.
const (
	AutoJSON      = "auto" // that of the preset
	extendedJSON  = "extended"
	plainJSON     = "plain"
	debeziumJSON  = "debezium"
	connectorJSON = "connector"
)

// jsonStyles are the styles of the ways to write documents.
var jsonStyles = map[string]envelope.Style{
	extendedJSON: envelope.Relaxed, plainJSON: envelope.Plain, debeziumJSON: envelope.Debezium, connectorJSON: envelope.Connector,
}

// preset is a shape of records. Each preset has one file, and embeds [defaults] for the decisions that it does not change. All
// presets are in allPresets; nothing else depends on their names.
type preset interface {
	presetName() string
	// defaultJSON is how the preset writes documents without PresetConfig.JSON.
	defaultJSON() string
	// defaultTemplate is the topic template without one in the configuration.
	defaultTemplate() string
	// fieldNames completes the names of the fields of documents. java is that of [envelope.NewMapping].
	fieldNames(n envelope.Names) (names envelope.Names, java bool)
	// wrapsDocuments reports whether a value with further fields contains a document as a text.
	wrapsDocuments() bool
	// checkConfig adds the problems of a configuration for this preset.
	checkConfig(bad *InvalidError, c PresetConfig)
	newFormat(c PresetConfig) format
	// leadingHeaders are constant headers of every record, before all others. A header of the configuration replaces the one
	// of its name. Those without a value are left out.
	leadingHeaders(c PresetConfig) []record.Header
	// base64IDs reports whether the header id of a UUID is base64.
	base64IDs() bool
}

// format adds the headers of a preset to f: the part of a record in which the presets differ. It may
// replace the value of rec, which is the payload. The headers of the delivery's identity are there already. The error is a
// [*record.Rejection] of a value that is too large.
type format func(f *Filler, v *envelope.View, m *Meta, rec *record.Record) error

// allPresets lists the presets. The default is the first.
var allPresets = []preset{typed{}, debezium{}, cloudEventsPreset{}, plain{}, connector{}}

// defaults are the decisions of most presets.
type defaults struct{}

func (defaults) defaultJSON() string                                { return extendedJSON }
func (defaults) defaultTemplate() string                            { return DefaultTemplate }
func (defaults) fieldNames(n envelope.Names) (envelope.Names, bool) { return n, false }
func (defaults) wrapsDocuments() bool                               { return false }
func (defaults) base64IDs() bool                                    { return false }

func (defaults) leadingHeaders(PresetConfig) []record.Header { return nil }

func (defaults) checkConfig(bad *InvalidError, cfg PresetConfig) {
	if cfg.Structured {
		bad.addProblem("structured", "true", "only the cloudevents preset has a structured mode")
	}
}

// findPreset returns the preset with this name; an empty name is the default. If there is no such preset, it returns the
// default and false.
func findPreset(name string) (preset, bool) {
	for _, p := range allPresets {
		if name == "" || p.presetName() == name {
			return p, true
		}
	}
	return allPresets[0], false
}

// TemplateOf returns the default of the topic template with a preset.
func TemplateOf(name string) string {
	preset, _ := findPreset(name)
	return preset.defaultTemplate()
}

// FieldNames returns the arguments of [envelope.NewMapping] for documents with a preset: n, completed as the preset needs.
func FieldNames(name string, n envelope.Names) (names envelope.Names, java bool) {
	preset, _ := findPreset(name)
	return preset.fieldNames(n)
}

// PresetNames returns the names of the presets. The default is the first.
func PresetNames() []string {
	names := make([]string, len(allPresets))
	for i, p := range allPresets {
		names[i] = p.presetName()
	}
	return names
}

// PresetConfig configures the shape of records.
type PresetConfig struct {
	Name       string            // one of the presets; empty is Typed
	Watcher    string            // the name of the watcher, if there is one
	Structured bool              // CloudEvents only: the whole event as one JSON document
	Source     string            // CloudEvents source of envelopes without one; empty is /<database>/<collection>
	Headers    map[string]string // further headers: name to template; empty values are left out
	// Placement adds fields of the document to the headers or to the value: "field:header" or "field:value", each with
	// ":alias" if the name differs. envelope means value.
	Placement []string
	JSON      string            // one of the ways to write documents; empty is AutoJSON
	Mapping   *envelope.Mapping // reads the documents; nil: they are envelopes of the contract
	MaxRecord int               // bytes of the largest record: payload, key, headers and topic together; 0: record.MaxRecord
}

// Preset is a validated PresetConfig. It is immutable.
type Preset struct {
	name    string // for logs
	format  format
	headers []extraHeader
	style   envelope.Style
	wrap    bool // the preset writes a document as a text if it adds fields to the value
	leading []record.Header
	// base64IDs: the header id of a UUID is base64
	base64IDs bool
	fields    []extraField // added to the value
	maxRecord int
}

// extraField is a field of the document that is added to the value.
type extraField struct {
	path string
	name []byte // as JSON, with a comma before and a colon after
}

type extraHeader struct {
	name  []byte
	value template
	text  []byte // the value if it has no placeholder
}

// placeholders are the fields that a header of the configuration may refer to.
var placeholders = []string{
	"aggregatetype", "aggregateid", "type", "contenttype", "schemaversion", "source", "subject", "time",
	kindDatabase, kindCollection, kindHeader, kindField,
}

// NewPreset validates cfg. Its error is an [*InvalidError] that lists every problem.
func NewPreset(cfg PresetConfig) (*Preset, error) {
	// For an unknown name, shape is the first preset, so that the other problems are found as well.
	shape, ok := findPreset(cfg.Name)
	preset := &Preset{
		name: shape.presetName(), format: shape.newFormat(cfg), wrap: shape.wrapsDocuments(), leading: shape.leadingHeaders(cfg),
		base64IDs: shape.base64IDs(), maxRecord: cmp.Or(cfg.MaxRecord, record.MaxRecord),
	}
	bad := &InvalidError{}

	if !ok {
		bad.addProblem("preset", cfg.Name, "expected one of "+strings.Join(PresetNames(), ", "))
	}
	if cfg.Structured {
		preset.name += ", structured"
	}
	shape.checkConfig(bad, cfg)

	for _, name := range slices.Sorted(maps.Keys(cfg.Headers)) {
		field, text := "headers."+name, cfg.Headers[name]
		if name == "" || name == record.HeaderID || strings.HasPrefix(name, record.ReservedPrefix) {
			bad.addProblem(field, name, "the names id and outrelay-* belong to outrelay")
			continue
		}

		template, err := parseTemplate(text, cfg.Mapping, placeholders...)
		if err != nil {
			bad.addProblem(field, text, err.Error())
			continue
		}

		header := extraHeader{name: []byte(name), value: template}
		// A header with a constant text needs no template for each record.
		if static, ok := template.staticText(); ok {
			header.text = []byte(static)
		}
		if !preset.replaceLeading(header) {
			preset.headers = append(preset.headers, header)
		}
	}
	preset.leading = slices.DeleteFunc(preset.leading, func(header record.Header) bool { return len(header.Value) == 0 })

	if cfg.JSON == "" || cfg.JSON == AutoJSON {
		cfg.JSON = shape.defaultJSON()
	}
	style, ok := jsonStyles[cfg.JSON]
	if !ok {
		bad.addProblem("json", cfg.JSON, "expected one of "+strings.Join(slices.Sorted(maps.Keys(jsonStyles)), ", "))
	}
	preset.style = style
	for i, text := range cfg.Placement {
		preset.addPlacement(bad, fmt.Sprintf("placement[%d]", i), text, cfg)
	}

	if err := bad.errOrNil(); err != nil {
		return nil, err
	}
	return preset, nil
}

// replaceLeading gives the leading header with the name of header the value of header. It returns false if header is not a leading header
// afterwards: if there is none of its name, or if its value is not constant.
func (p *Preset) replaceLeading(header extraHeader) bool {
	for i := range p.leading {
		if string(p.leading[i].Key) == string(header.name) {
			p.leading[i].Value = header.text
			return header.text != nil
		}
	}
	return false
}

// addPlacement parses one entry of PresetConfig.Placement.
func (p *Preset) addPlacement(bad *InvalidError, key, text string, cfg PresetConfig) {
	parts := strings.Split(text, ":")
	field, alias := parts[0], parts[0]
	if len(parts) == 3 {
		alias = parts[2]
	}
	if len(parts) < 2 || len(parts) > 3 || alias == "" {
		bad.addProblem(key, text, "expected field:header, field:value, or one of them with :alias")
		return
	}
	if field != "_id" {
		if reason := cfg.Mapping.FieldProblem(field); reason != "" {
			bad.addProblem(key, text, reason)
			return
		}
	}

	switch parts[1] {
	case "header":
		if problem := envelope.HeaderProblem([]byte(alias)); problem != "" {
			bad.addProblem(key, text, problem)
			return
		}
		p.headers = append(p.headers, extraHeader{name: []byte(alias), value: template{{placeholder: placeholder{kindField, field}}}})
	case "value", "envelope":
		if cfg.Structured {
			bad.addProblem(key, text, "the value is a CloudEvent in the structured mode; use header")
			return
		}
		// The name is stored as it is written: with the comma before it and the colon after it.
		name, _ := envelope.AppendQuoted([]byte(","), []byte(alias), envelope.NoLimit)
		name = append(name, ':')
		isTaken := slices.ContainsFunc(p.fields, func(extraField extraField) bool { return string(extraField.name) == string(name) })
		if alias == "payload" || isTaken {
			bad.addProblem(key, text, "the value already has a member "+alias+"; choose another alias")
			return
		}
		p.fields = append(p.fields, extraField{field, name})
	// Debezium's third placement has a key of its own.
	case "partition":
		bad.addProblem(key, text, "set mapping.partition: "+field+" instead of this entry")
	default:
		bad.addProblem(key, text, "expected header or value after the field")
	}
}

// String returns the name of the preset.
func (p *Preset) String() string { return p.name }
