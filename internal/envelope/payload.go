package envelope

import "go.mongodb.org/mongo-driver/v2/bson"

// AppendPayload appends the payload of v to dst, as the value of its record. The bytes of a binary
// or a string are appended unchanged. A document or an array is appended as relaxed Extended JSON
// on one line, and the same document always gives the same bytes. A null payload appends nothing:
// see View.Tombstone.
//
// If the inside of a document is invalid, AppendPayload returns dst unchanged and a *record.Refusal
// of class malformed.
func AppendPayload(dst []byte, v *View) ([]byte, error) {
	var out []byte
	var ok bool
	switch bson.Type(v.PayloadType) {
	case bson.TypeEmbeddedDocument:
		out, ok = appendDocument(dst, v.Payload, 1)
	case bson.TypeArray:
		out, ok = appendArray(dst, v.Payload, 1)
	default:
		return append(dst, v.Payload...), nil
	}

	if !ok {
		return dst, newMalformed("payload is a document whose inside is broken or nested deeper than %d", maxDepth)
	}

	return out, nil
}
