package event

import (
	"bytes"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"unicode/utf8"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/contract/envelope"
	"github.com/outrelay/outrelay/pkg/codec"
)

// Payload is the encoded body of an event. The zero value is a tombstone: the value of the record
// is null.
type Payload struct {
	contentType string
	typ         bson.Type // 0 for a tombstone
	data        []byte    // the bytes of a binary or a text, or BSON of a document or an array
	problem     string    // why there is no valid payload, or ""
}

// JSON returns value encoded by codec.JSON: by encoding/json, without escapes for HTML.
func JSON(value any) Payload { return Encode(nil, value) }

// Encode returns value encoded by codec, with the content type of codec. If codec is nil, codec.JSON encodes value. A
// nil pointer or map is reported as a mistake. Pass Payload{} for a tombstone.
func Encode(codec codec.Codec, value any) Payload {
	codec = codecOrJSON(codec)
	if isNil(value) {
		return newNilPayload(value)
	}

	data, err := codec.Encode(value)
	if err != nil {
		return Payload{problem: fmt.Sprintf("payload of type %T: %s", value, err)}
	}
	return newBytesPayload(codec.ContentType(), data)
}

// Bytes returns a payload with a copy of body. contentType is its media type, or "" if it has none. A
// nil body is an empty payload, not a tombstone.
func Bytes(contentType string, body []byte) Payload {
	return newBytesPayload(contentType, bytes.Clone(body))
}

// Document returns a payload that is stored as a BSON document or array, which MongoDB can query.
// The relay publishes it as relaxed Extended JSON on one line: a date becomes {"$date": …}, and
// struct tags `bson:"…"` apply. Consumers decode it with codec.ExtJSON.
func Document(value any) Payload {
	if raw, ok := value.(bson.Raw); ok {
		if err := raw.Validate(); err != nil {
			return Payload{problem: fmt.Sprintf("payload: %s", err)}
		}
		// The caller may reuse its bytes.
		return Payload{typ: bson.TypeEmbeddedDocument, data: slices.Clone(raw)}
	}
	if isNil(value) {
		return newNilPayload(value)
	}

	bsonType, data, err := bson.MarshalValue(value)
	switch {
	case err != nil:
		return Payload{problem: fmt.Sprintf("payload of type %T: %s", value, err)}
	case bsonType == bson.TypeEmbeddedDocument || bsonType == bson.TypeArray:
		return Payload{typ: bsonType, data: slices.Clone(data)}
	case bsonType == bson.TypeNull:
		return newNilPayload(value)
	default:
		return Payload{problem: fmt.Sprintf("payload of type %T is %s in BSON, not a document or an array: use JSON, Encode or Bytes", value, bsonType)}
	}
}

func newBytesPayload(contentType string, data []byte) Payload {
	bsonType := bson.TypeBinary
	if isText(contentType) && utf8.Valid(data) {
		bsonType = bson.TypeString
	}
	return Payload{contentType: contentType, typ: bsonType, data: data}
}

// newNilPayload reports a nil value, which usually is a mistake.
func newNilPayload(value any) Payload {
	return Payload{problem: fmt.Sprintf("payload is a nil %T: for a tombstone, use Type.Tombstone or Payload{}", value)}
}

// value returns the value of the record, which is nil for a tombstone only.
func (p Payload) value() ([]byte, error) {
	if p.typ == 0 {
		return nil, nil
	}

	view := envelope.View{PayloadType: byte(p.typ), Payload: p.data}
	out, err := envelope.AppendPayload([]byte{}, &view)
	return slices.Clip(out), err
}

// isNil reports whether value contains no value. A nil slice of bytes is empty, but not nil.
func isNil(value any) bool {
	switch val := reflect.ValueOf(value); val.Kind() {
	case reflect.Invalid:
		return true
	case reflect.Pointer, reflect.Map:
		return val.IsNil()
	case reflect.Slice:
		return val.IsNil() && val.Type().Elem().Kind() != reflect.Uint8
	default:
		return false
	}
}

// isText reports whether payloads of a media type are texts that a person can read.
func isText(contentType string) bool {
	media, _, _ := strings.Cut(contentType, ";")
	media = strings.ToLower(strings.TrimSpace(media))
	return strings.HasPrefix(media, "text/") || media == "application/json" || strings.HasSuffix(media, "+json")
}
