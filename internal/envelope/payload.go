package envelope

import "go.mongodb.org/mongo-driver/v2/bson"

// AppendPayload appends the payload of v to dst, as the value of its record. The bytes of a binary
// or a string are appended unchanged. A document or an array is appended as relaxed Extended JSON
// on one line, and the same document always gives the same bytes. A null payload appends nothing:
// see View.Tombstone.
//
// If the inside of a document is invalid, AppendPayload returns dst unchanged and a *record.Refusal
// of class malformed.
func AppendPayload(dst []byte, v *View) ([]byte, error) { return AppendPayloadAs(dst, v, Relaxed) }

// HasRawPayload reports whether Payload contains the bytes of the value of the record: those of a binary or of a string, or
// none for null.
func (v *View) HasRawPayload() bool {
	switch bson.Type(v.PayloadType) {
	case bson.TypeBinary, bson.TypeString, bson.TypeNull, 0:
		return true
	}
	return false
}

// AppendPayloadAs is AppendPayload with a style for payloads that are neither binaries nor strings.
func AppendPayloadAs(dst []byte, v *View, style Style) ([]byte, error) {
	var out []byte
	var ok bool
	switch {
	case v.whole:
		out, ok = appendWhole(dst, v.Payload, style)
	case v.HasRawPayload():
		return append(dst, v.Payload...), nil
	// Debezium's router writes only documents as JSON.
	case style == Debezium && bson.Type(v.PayloadType) != bson.TypeEmbeddedDocument:
		out, ok = appendJavaText(dst, bson.Type(v.PayloadType), v.Payload, 0)
	default:
		out, ok = AppendValue(dst, bson.Type(v.PayloadType), v.Payload, style)
	}

	if !ok {
		return dst, newMalformed("payload is a document whose inside is broken or nested deeper than %d", maxDepth)
	}

	return out, nil
}
