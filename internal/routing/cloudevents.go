package routing

import (
	"encoding/base64"
	"encoding/json"
	"unicode/utf8"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/record"
	"github.com/outrelay/outrelay/pkg/event"
)

// addCloudEventsHeaders adds the headers of the binary mode. The value stays the payload. A tombstone has
// this form also in the structured mode, because only a null value deletes a key from a compacted topic.
func (f *Filler) addCloudEventsHeaders(v *event.View, m *Meta) {
	id := f.headers[0].Value
	f.addHeader(hCESpec, specVersion)
	f.addHeader(hCEID, id)
	f.addHeader(hCESource, f.cloudEventsSource(v, m))
	f.addHeader(hCEType, v.Type)
	f.addOptionalHeader(hCESubject, v.Subject)
	f.addHeader(hCETime, f.cloudEventsTime(v, m))
	f.addOptionalHeader(hCESchemaVersion, v.SchemaVersion)
	f.addOptionalHeader(hHTTPContentType, dataContentType(v))
}

// cloudEventsSource returns the source of the envelope, the configured one, or else the path of the
// collection. Source and id together must identify one event.
func (f *Filler) cloudEventsSource(v *event.View, m *Meta) []byte {
	if len(v.Source) > 0 {
		return v.Source
	}
	if len(f.preset.source) > 0 {
		return f.preset.source
	}

	start := len(f.buf)
	f.buf = append(f.buf, '/')
	f.buf = append(f.buf, m.DB...)
	f.buf = append(f.buf, '/')
	f.buf = append(f.buf, m.Coll...)
	return f.buf[start:]
}

// cloudEventsTime returns the time in the envelope, or the time of its commit if it has none.
func (f *Filler) cloudEventsTime(v *event.View, m *Meta) []byte {
	if v.HasTime {
		return f.formatTime(v.Time)
	}
	return f.formatTime(commitMS(m))
}

// dataContentType returns the content type of the envelope, JSON for documents, or nil if it is unknown.
func dataContentType(v *event.View) []byte {
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
func (f *Filler) setStructuredValue(v *event.View, m *Meta, rec *record.Record) {
	f.addHeader(hHTTPContentType, structuredType)

	// Source and time may append to f.buf, so they must be complete before the document starts there.
	id, source, at := f.headers[0].Value, f.cloudEventsSource(v, m), f.cloudEventsTime(v, m)
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
		if a.value == nil {
			continue
		}
		b = append(b, `,"`...)
		b = append(b, a.name...)
		b = append(b, `":`...)
		b = appendJSONString(b, a.value)
	}

	f.buf = append(appendData(b, v, rec.Value), '}')
	rec.Value = f.buf[start:len(f.buf):len(f.buf)]
}

// appendData appends the payload: JSON unchanged, text as a JSON string, everything else as base64.
func appendData(b []byte, v *event.View, payload []byte) []byte {
	kind := bson.Type(v.PayloadType)
	isDocument := kind == bson.TypeEmbeddedDocument || kind == bson.TypeArray
	if isDocument || isJSON(v.ContentType) && json.Valid(payload) {
		b = append(b, `,"data":`...)
		return append(b, payload...)
	}

	if kind == bson.TypeString && utf8.Valid(payload) {
		b = append(b, `,"data":`...)
		return appendJSONString(b, payload)
	}

	b = append(b, `,"data_base64":"`...)
	b = base64.StdEncoding.AppendEncode(b, payload)
	return append(b, '"')
}

// appendJSONString appends text as a JSON string.
func appendJSONString(dst, text []byte) []byte {
	// Marshal never fails for a string.
	quoted, _ := json.Marshal(string(text))
	return append(dst, quoted...)
}
