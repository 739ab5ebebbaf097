package event

import "go.mongodb.org/mongo-driver/v2/bson"

// AppendPayload appends the record value of the payload. Binary and string are their bytes as they are; a document or an
// array becomes relaxed Extended JSON on one line, the same bytes for the same document always; null appends nothing (see
// Tombstone). A document whose inside is broken is a *record.Refusal of class malformed, and dst comes back as it was.
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
		return dst, malformed("payload is a document whose inside is broken or nested deeper than %d", maxDepth)
	}
	return out, nil
}
