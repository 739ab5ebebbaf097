package routing

import (
	"bytes"
	"encoding/json"
	"unicode/utf8"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/contract/envelope"
	"github.com/outrelay/outrelay/internal/contract/record"
)

var (
	hCESpecVersion   = []byte(record.HeaderCESpecVersion)
	hCEID            = []byte(record.HeaderCEID)
	hCESource        = []byte(record.HeaderCESource)
	hCEType          = []byte(record.HeaderCEType)
	hCESubject       = []byte(record.HeaderCESubject)
	hCETime          = []byte(record.HeaderCETime)
	hCESchemaVersion = []byte(record.HeaderCESchemaVersion)
	hHTTPContentType = []byte(record.HeaderHTTPContentType)

	specVersion    = []byte("1.0")
	jsonType       = []byte("application/json")
	structuredType = []byte(record.TypeCloudEvents + "; charset=UTF-8")
)

// CloudEvents is the preset of the Kafka binding of CloudEvents 1.0.
const CloudEvents = "cloudevents"

type cloudEventsPreset struct{ defaults }

func (cloudEventsPreset) presetName() string { return CloudEvents }

func (cloudEventsPreset) checkConfig(bad *InvalidError, c PresetConfig) {
	if !c.Mapping.Has("type") {
		bad.addProblem("preset", c.Name, "a CloudEvent has a type, and by the mapping, the documents have none")
	}
}

func (cloudEventsPreset) newFormat(c PresetConfig) format {
	return (&cloudEvents{c.Structured, []byte(c.Source)}).addTo
}

// cloudEvents is the binary mode, with ce_ headers, or the structured mode.
type cloudEvents struct {
	structured bool
	source     []byte // of envelopes without a source; nil is the path of the collection
}

func (c *cloudEvents) addTo(f *Filler, v *envelope.View, m *Meta, rec *record.Record) error {
	// A tombstone has the form of the binary mode also in the structured mode, because only a null
	// value deletes a key from a compacted topic.
	if c.structured && rec.Value != nil {
		return c.setStructuredValue(f, v, m, rec)
	}

	id := f.headers[0].Value
	f.addHeader(hCESpecVersion, specVersion)
	f.addHeader(hCEID, id)
	f.addHeader(hCESource, c.sourceOf(f, v, m))
	f.addHeader(hCEType, v.Type)
	f.addOptionalHeader(hCESubject, v.Subject)
	f.addHeader(hCETime, f.cloudEventsTime(v, m))
	f.addOptionalHeader(hCESchemaVersion, v.SchemaVersion)
	f.addOptionalHeader(hHTTPContentType, dataContentType(v))
	return nil
}

// sourceOf returns the source of the envelope, the configured one, or else the path of the
// collection. Source and id together must identify one event.
func (c *cloudEvents) sourceOf(f *Filler, v *envelope.View, m *Meta) []byte {
	if len(v.Source) > 0 {
		return v.Source
	}
	if len(c.source) > 0 {
		return c.source
	}

	start := len(f.buf)
	f.buf = append(f.buf, '/')
	f.buf = append(f.buf, m.DB...)
	f.buf = append(f.buf, '/')
	f.buf = append(f.buf, m.Coll...)
	return f.buf[start:]
}

// cloudEventsTime returns the time in the envelope, or the time of its commit if it has none.
func (f *Filler) cloudEventsTime(v *envelope.View, m *Meta) []byte {
	if v.HasTime {
		return f.formatTime(v.Time)
	}
	return f.formatTime(commitMS(m))
}

// dataContentType returns the content type of the envelope, JSON for documents, or nil if it is unknown.
func dataContentType(v *envelope.View) []byte {
	if v.ContentType != nil {
		return v.ContentType
	}
	switch bson.Type(v.PayloadType) {
	case bson.TypeEmbeddedDocument, bson.TypeArray:
		return jsonType
	}
	return nil
}

// setStructuredValue replaces the value, which is the payload, with the whole event as one JSON document.
func (c *cloudEvents) setStructuredValue(f *Filler, v *envelope.View, m *Meta, rec *record.Record) error {
	f.addHeader(hHTTPContentType, structuredType)

	// Source and time may append to f.buf, so they must be complete before the document starts there.
	id, source, at := f.headers[0].Value, c.sourceOf(f, v, m), f.cloudEventsTime(v, m)
	start := len(f.buf)
	b := append(f.buf, `{"specversion":"1.0"`...)
	for _, a := range []struct {
		name  string
		value []byte
	}{
		{"id", id},
		{"source", source},
		{"type", v.Type},
		{"subject", v.Subject},
		{"time", at},
		{"datacontenttype", dataContentType(v)},
		{"schemaversion", v.SchemaVersion},
		{"partitionkey", rec.Key},
	} {
		// CloudEvents leaves out attributes without a value.
		if a.value == nil {
			continue
		}
		b = append(b, `,"`...)
		b = append(b, a.name...)
		b = append(b, `":`...)
		// The texts were bounded when the envelope was read.
		b, _ = envelope.AppendQuoted(b, a.value, envelope.NoLimit)
	}

	b, err := f.appendData(b, v, rec.Value)
	if err != nil {
		return err
	}
	f.buf = append(b, '}')
	rec.Value = f.buf[start:len(f.buf):len(f.buf)]
	return nil
}

// appendData appends the payload: JSON unchanged, text as a JSON string, everything else as base64. The error is a refusal
// of a payload that is too large.
func (f *Filler) appendData(b []byte, v *envelope.View, payload []byte) ([]byte, error) {
	kind := bson.Type(v.PayloadType)
	isDocument := kind == bson.TypeEmbeddedDocument || kind == bson.TypeArray
	// A text that only claims to be JSON would break the document.
	if isDocument || isJSON(v.ContentType) && json.Valid(payload) {
		b = append(b, `,"data":`...)
		return append(b, payload...), nil
	}

	if kind == bson.TypeString && utf8.Valid(payload) {
		return f.appendQuoted(append(b, `,"data":`...), payload)
	}
	return f.appendBase64(append(b, `,"data_base64":`...), payload)
}

// isJSON reports whether contentType is application/json or ends with +json, apart from parameters.
func isJSON(contentType []byte) bool {
	kind, _, _ := bytes.Cut(contentType, []byte(";"))
	kind = bytes.TrimSpace(kind)
	return bytes.EqualFold(kind, jsonType) || len(kind) > 5 && bytes.EqualFold(kind[len(kind)-5:], []byte("+json"))
}
