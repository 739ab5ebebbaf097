package routing

import (
	"encoding/base64"
	"encoding/json"
	"unicode/utf8"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/record"
	"github.com/outrelay/outrelay/pkg/event"
)

// addCloudEventsHeaders adds the headers of the binary mode; the value stays the payload. A tombstone takes this form in the
// structured mode too, because a value that is not null would not delete anything from a compacted topic.
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

// cloudEventsSource is the envelope's own, the configured one, or the collection: with the id it has to name one event.
func (f *Filler) cloudEventsSource(v *event.View, m *Meta) []byte {
	switch {
	case len(v.Source) > 0:
		return v.Source
	case len(f.preset.source) > 0:
		return f.preset.source
	}
	start := len(f.buf)
	f.buf = append(append(append(append(f.buf, '/'), m.DB...), '/'), m.Coll...)
	return f.buf[start:]
}

// cloudEventsTime is when it happened: as the envelope says, else when it was committed.
func (f *Filler) cloudEventsTime(v *event.View, m *Meta) []byte {
	if v.HasTime {
		return f.formatTime(v.Time)
	}
	return f.formatTime(commitMS(m))
}

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

// setStructuredValue replaces the value, which is the payload, by the whole event as one JSON document.
func (f *Filler) setStructuredValue(v *event.View, m *Meta, rec *record.Record) error {
	f.addHeader(hHTTPContentType, structuredType)
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
		b = append(append(append(b, `,"`...), a.name...), `":`...)
		b = appendJSONString(b, a.value)
	}
	f.buf = append(appendData(b, v, rec.Value), '}')
	rec.Value = f.buf[start:len(f.buf):len(f.buf)]
	return nil
}

// appendData appends the payload: JSON as it is, text as a string, everything else in base64.
func appendData(b []byte, v *event.View, payload []byte) []byte {
	isDocument := bson.Type(v.PayloadType) == bson.TypeEmbeddedDocument || bson.Type(v.PayloadType) == bson.TypeArray
	switch {
	case isDocument, isJSON(v.ContentType) && json.Valid(payload):
		b = append(b, `,"data":`...)
		return append(b, payload...)
	case bson.Type(v.PayloadType) == bson.TypeString && utf8.Valid(payload):
		b = append(b, `,"data":`...)
		return appendJSONString(b, payload)
	}
	b = append(b, `,"data_base64":"`...)
	b = base64.StdEncoding.AppendEncode(b, payload)
	return append(b, '"')
}

// appendJSONString appends text as a JSON string. Marshal of a string has no error to return.
func appendJSONString(dst, text []byte) []byte {
	quoted, _ := json.Marshal(string(text))
	return append(dst, quoted...)
}
