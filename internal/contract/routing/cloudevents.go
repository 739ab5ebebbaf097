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

func (cloudEventsPreset) checkConfig(bad *InvalidError, cfg PresetConfig) {
	if !cfg.Mapping.Has("type") {
		bad.addProblem("preset", cfg.Name, "a CloudEvent has a type, and by the mapping, the documents have none")
	}
}

func (cloudEventsPreset) newFormat(cfg PresetConfig) format {
	return (&cloudEvents{cfg.Structured, []byte(cfg.Source)}).addTo
}

// cloudEvents is the binary mode, with ce_ headers, or the structured mode.
type cloudEvents struct {
	structured bool
	source     []byte // of envelopes without a source; nil is the path of the collection
}

func (c *cloudEvents) addTo(filler *Filler, view *envelope.View, meta *Meta, rec *record.Record) error {
	// A tombstone has the form of the binary mode also in the structured mode, because only a null
	// value deletes a key from a compacted topic.
	if c.structured && rec.Value != nil {
		return c.setStructuredValue(filler, view, meta, rec)
	}

	id := filler.headers[0].Value
	filler.addHeader(hCESpecVersion, specVersion)
	filler.addHeader(hCEID, id)
	filler.addHeader(hCESource, c.sourceOf(filler, view, meta))
	filler.addHeader(hCEType, view.Type)
	filler.addOptionalHeader(hCESubject, view.Subject)
	filler.addHeader(hCETime, filler.cloudEventsTime(view, meta))
	filler.addOptionalHeader(hCESchemaVersion, view.SchemaVersion)
	filler.addOptionalHeader(hHTTPContentType, dataContentType(view))
	return nil
}

// sourceOf returns the source of the envelope, the configured one, or else the path of the
// collection. Source and id together must identify one event.
func (c *cloudEvents) sourceOf(filler *Filler, view *envelope.View, meta *Meta) []byte {
	if len(view.Source) > 0 {
		return view.Source
	}
	if len(c.source) > 0 {
		return c.source
	}

	start := len(filler.buf)
	filler.buf = append(filler.buf, '/')
	filler.buf = append(filler.buf, meta.DB...)
	filler.buf = append(filler.buf, '/')
	filler.buf = append(filler.buf, meta.Coll...)
	return filler.buf[start:]
}

// cloudEventsTime returns the time in the envelope, or the time of its commit if it has none.
func (f *Filler) cloudEventsTime(view *envelope.View, meta *Meta) []byte {
	if view.HasTime {
		return f.formatTime(view.Time)
	}
	return f.formatTime(commitMS(meta))
}

// dataContentType returns the content type of the envelope, JSON for documents, or nil if it is unknown.
func dataContentType(view *envelope.View) []byte {
	if view.ContentType != nil {
		return view.ContentType
	}
	switch bson.Type(view.PayloadType) {
	case bson.TypeEmbeddedDocument, bson.TypeArray:
		return jsonType
	}
	return nil
}

// setStructuredValue replaces the value, which is the payload, with the whole event as one JSON document.
func (c *cloudEvents) setStructuredValue(filler *Filler, view *envelope.View, meta *Meta, rec *record.Record) error {
	filler.addHeader(hHTTPContentType, structuredType)

	// Source and time may append to filler.buf, so they must be complete before the document starts there.
	id, source, at := filler.headers[0].Value, c.sourceOf(filler, view, meta), filler.cloudEventsTime(view, meta)
	start := len(filler.buf)
	body := append(filler.buf, `{"specversion":"1.0"`...)
	for _, a := range []struct {
		name  string
		value []byte
	}{
		{"id", id},
		{"source", source},
		{"type", view.Type},
		{"subject", view.Subject},
		{"time", at},
		{"datacontenttype", dataContentType(view)},
		{"schemaversion", view.SchemaVersion},
		{"partitionkey", rec.Key},
	} {
		// CloudEvents leaves out attributes without a value.
		if a.value == nil {
			continue
		}
		body = append(body, `,"`...)
		body = append(body, a.name...)
		body = append(body, `":`...)
		// The texts were bounded when the envelope was read.
		body, _ = envelope.AppendQuoted(body, a.value, envelope.NoLimit)
	}

	body, err := filler.appendData(body, view, rec.Value)
	if err != nil {
		return err
	}
	filler.buf = append(body, '}')
	rec.Value = filler.buf[start:len(filler.buf):len(filler.buf)]
	return nil
}

// appendData appends the payload: JSON unchanged, text as a JSON string, everything else as base64. The error is a rejection
// of a payload that is too large.
func (f *Filler) appendData(dst []byte, view *envelope.View, payload []byte) ([]byte, error) {
	kind := bson.Type(view.PayloadType)
	isDocument := kind == bson.TypeEmbeddedDocument || kind == bson.TypeArray
	// A text that only claims to be JSON would break the document.
	if isDocument || isJSON(view.ContentType) && json.Valid(payload) {
		dst = append(dst, `,"data":`...)
		return append(dst, payload...), nil
	}

	if kind == bson.TypeString && utf8.Valid(payload) {
		return f.appendQuoted(append(dst, `,"data":`...), payload)
	}
	return f.appendBase64(append(dst, `,"data_base64":`...), payload)
}

// isJSON reports whether contentType is application/json or ends with +json, apart from parameters.
func isJSON(contentType []byte) bool {
	kind, _, _ := bytes.Cut(contentType, []byte(";"))
	kind = bytes.TrimSpace(kind)
	return bytes.EqualFold(kind, jsonType) || len(kind) > 5 && bytes.EqualFold(kind[len(kind)-5:], []byte("+json"))
}
