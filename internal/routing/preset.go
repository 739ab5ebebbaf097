package routing

import (
	"cmp"
	"fmt"
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
	Connector   = "kafka-connector" // whole documents, as the MongoDB Kafka connector publishes them
)

// The ways to write documents as JSON.
const (
	AutoJSON      = "auto" // that of the preset
	ExtendedJSON  = "extended"
	PlainJSON     = "plain"
	DebeziumJSON  = "debezium"
	ConnectorJSON = "connector"
)

// jsonStyles are the styles of the ways to write documents.
var jsonStyles = map[string]envelope.Style{
	ExtendedJSON: envelope.Relaxed, PlainJSON: envelope.Plain, DebeziumJSON: envelope.Debezium, ConnectorJSON: envelope.Connector,
}

// defaultJSON returns how a preset writes documents.
func defaultJSON(preset string) string {
	switch preset {
	case Debezium:
		return DebeziumJSON
	case Connector:
		return ConnectorJSON
	}
	return ExtendedJSON
}

// TemplateOf returns the default of the topic template with a preset.
func TemplateOf(preset string) string {
	if preset == Connector {
		return "{" + kindDatabase + "}.{" + kindCollection + "}"
	}
	return DefaultTemplate
}

// FieldNames returns the names of the fields of documents with a preset. With Connector, a document has only the parts that
// n names, and is the payload as a whole.
func FieldNames(preset string, n envelope.Names) envelope.Names {
	if preset != Connector {
		return n
	}

	n.Payload = cmp.Or(n.Payload, envelope.WholeDocument)
	n.Key = cmp.Or(n.Key, envelope.WholeDocument)
	for _, name := range []*string{
		&n.AggregateType, &n.AggregateID, &n.Type, &n.Topic, &n.Partition, &n.Headers, &n.ContentType, &n.SchemaVersion, &n.Source,
		&n.Subject, &n.Time, &n.ExpiresAt,
	} {
		*name = cmp.Or(*name, envelope.NoField)
	}
	return n
}

// format adds the headers of a preset to f: the part of a record in which the presets differ. It may
// replace the value of rec, which is the payload. The headers of the delivery's identity are there already.
type format func(f *Filler, v *envelope.View, m *Meta, rec *record.Record)

// newFormat returns the format of the preset called c.Name, or nil if there is no such preset.
func newFormat(c PresetConfig) format {
	switch c.Name {
	case Typed:
		// Debezium's record with an additional header for the type.
		return func(f *Filler, v *envelope.View, _ *Meta, _ *record.Record) { f.addOptionalHeader(hType, v.Type) }
	case Debezium, Connector:
		// The record of Debezium's MongoEventRouter with its defaults has no header but the id. That of the MongoDB Kafka
		// connector has none at all, but a read-back needs the id.
		return func(*Filler, *envelope.View, *Meta, *record.Record) {}
	case CloudEvents:
		return (&cloudEvents{c.Structured, []byte(c.Source)}).addTo
	case Plain:
		return addPlainHeaders
	}
	return nil
}

// PresetNames returns the names of the presets. The default is the first.
func PresetNames() []string { return []string{Typed, Debezium, CloudEvents, Plain, Connector} }

// PresetConfig configures the shape of records.
type PresetConfig struct {
	Name       string            // one of the presets; empty is Typed
	Structured bool              // CloudEvents only: the whole event as one JSON document
	Source     string            // CloudEvents source of envelopes without one; empty is /<database>/<collection>
	Headers    map[string]string // further headers: name to template; empty values are left out
	// Placement adds fields of the document to the headers or to the value: "field:header" or "field:value", each with
	// ":alias" if the name differs. envelope means value.
	Placement []string
	JSON      string            // one of the ways to write documents; empty is AutoJSON
	Mapping   *envelope.Mapping // reads the documents; nil: they are envelopes of the contract
}

// Preset is a validated PresetConfig. It is immutable.
type Preset struct {
	name    string // for logs
	format  format
	headers []extraHeader
	style   envelope.Style
	wrap    bool         // the preset writes a document as a text if it adds fields to the value
	fields  []extraField // added to the value
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

// NewPreset validates c. Its error is an [*InvalidError] that lists every problem.
func NewPreset(c PresetConfig) (*Preset, error) {
	c.Name = cmp.Or(c.Name, Typed)
	p := &Preset{name: c.Name, format: newFormat(c), wrap: c.Name == Debezium}
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

		t, err := parseTemplate(text, c.Mapping, placeholders...)
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

	if c.JSON == "" || c.JSON == AutoJSON {
		c.JSON = defaultJSON(c.Name)
	}
	style, ok := jsonStyles[c.JSON]
	if !ok {
		bad.addProblem("json", c.JSON, "expected one of "+strings.Join(slices.Sorted(maps.Keys(jsonStyles)), ", "))
	}
	p.style = style
	for i, text := range c.Placement {
		p.addPlacement(bad, fmt.Sprintf("placement[%d]", i), text, c)
	}
	if c.Name == CloudEvents && !c.Mapping.Has("type") {
		bad.addProblem("preset", c.Name, "a CloudEvent has a type, and by the mapping, the documents have none")
	}

	if err := bad.errOrNil(); err != nil {
		return nil, err
	}
	return p, nil
}

// addPlacement parses one entry of PresetConfig.Placement.
func (p *Preset) addPlacement(bad *InvalidError, key, text string, c PresetConfig) {
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
		if reason := c.Mapping.FieldProblem(field); reason != "" {
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
		if c.Structured {
			bad.addProblem(key, text, "the value is a CloudEvent in the structured mode; use header")
			return
		}
		name := append(envelope.AppendQuoted([]byte(","), []byte(alias)), ':')
		isTaken := slices.ContainsFunc(p.fields, func(f extraField) bool { return string(f.name) == string(name) })
		if alias == "payload" || isTaken {
			bad.addProblem(key, text, "the value already has a member "+alias+"; choose another alias")
			return
		}
		p.fields = append(p.fields, extraField{field, name})
	default:
		bad.addProblem(key, text, "expected header or value after the field")
	}
}

// String returns the name of the preset.
func (p *Preset) String() string { return p.name }
