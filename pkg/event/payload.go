package event

import (
	"fmt"

	"go.mongodb.org/mongo-driver/v2/bson"
)

// AppendPayload appends the record value of the payload. Binary and string are their bytes as they are; a document or an
// array becomes relaxed Extended JSON on one line, the same bytes for the same document always; null appends nothing (see
// Tombstone). A document whose inside is broken is a *record.Refusal of class malformed.
func AppendPayload(dst []byte, v *View) ([]byte, error) {
	switch bson.Type(v.PayloadType) {
	case bson.TypeEmbeddedDocument:
		return appendJSON(dst, v.Payload)
	case bson.TypeArray:
		return appendJSONArray(dst, v.Payload)
	}
	return append(dst, v.Payload...), nil
}

func appendJSON(dst, doc []byte) ([]byte, error) {
	if err := bson.Raw(doc).Validate(); err != nil {
		return dst, malformed("payload: %s", err)
	}
	js, err := bson.MarshalExtJSON(bson.Raw(doc), false, false)
	if err != nil {
		return dst, malformed("payload: %s", err)
	}
	return append(dst, js...), nil
}

// appendJSONArray writes the array as the only field of a document, since only a document can stand alone, and takes it
// out again.
func appendJSONArray(dst, arr []byte) ([]byte, error) {
	const open, closing = `{"a":`, `}`
	doc, err := bson.Marshal(bson.D{{Key: "a", Value: bson.RawValue{Type: bson.TypeArray, Value: arr}}})
	if err != nil {
		return dst, malformed("payload: %s", err)
	}
	js, err := appendJSON(nil, doc)
	if err != nil {
		return dst, err
	}
	if len(js) < len(open)+len(closing) || string(js[:len(open)]) != open {
		return dst, fmt.Errorf("payload: unexpected shape of Extended JSON")
	}
	return append(dst, js[len(open):len(js)-len(closing)]...), nil
}
