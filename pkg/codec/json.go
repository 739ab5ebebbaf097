package codec

import (
	"bytes"
	"context"
	"encoding/json"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/contract/envelope"
)

const jsonType = "application/json"

// JSON returns the codec of encoding/json. Struct tags `json:"…"` apply. Encode does not escape the
// HTML characters <, > and &. Decode ignores unknown fields, so producers may add fields. The
// content type is application/json.
func JSON() Codec { return jsonCodec{} }

type jsonCodec struct{}

func (jsonCodec) ContentType() string { return jsonType }

func (jsonCodec) Encode(value any) ([]byte, error) {
	var buf bytes.Buffer
	enc := json.NewEncoder(&buf)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(value); err != nil {
		return nil, err
	}

	// The encoder ends each value with a newline.
	return bytes.TrimSuffix(buf.Bytes(), []byte("\n")), nil
}

func (jsonCodec) Decode(_ context.Context, data []byte, into any) error {
	return json.Unmarshal(data, into)
}

// ExtJSON returns the codec of MongoDB's relaxed Extended JSON. Struct tags `bson:"…"` apply. The
// relay publishes payloads that are stored as BSON documents in this format, so use ExtJSON to read
// them. For new types of events, use JSON. The content type is application/json.
func ExtJSON() Codec { return extJSONCodec{} }

type extJSONCodec struct{}

func (extJSONCodec) ContentType() string { return jsonType }

// Encode returns the bytes that the relay publishes for event.Document(payload).
func (extJSONCodec) Encode(payload any) ([]byte, error) {
	bsonType, value, err := bson.MarshalValue(payload)
	if err != nil {
		return nil, err
	}

	switch bsonType {
	case bson.TypeEmbeddedDocument, bson.TypeArray:
		return envelope.AppendPayload(nil, &envelope.View{PayloadType: byte(bsonType), Payload: value})
	default:
		return nil, newTypeError("ExtJSON", payload, "a value that is a document or an array in BSON")
	}
}

func (extJSONCodec) Decode(_ context.Context, data []byte, into any) error {
	return bson.UnmarshalExtJSON(data, false, into)
}
