package envelope

import (
	"errors"

	"go.mongodb.org/mongo-driver/v2/bson"
)

// AppendPayload appends the payload of view to dst, as the value of its record. The bytes of a binary
// or a string are appended unchanged. A document or an array is appended as relaxed Extended JSON
// on one line, and the same document always gives the same bytes. A null payload appends nothing:
// see View.Tombstone.
//
// If the inside of a document is invalid, AppendPayload returns dst unchanged and a *record.Rejection
// of class malformed.
func AppendPayload(dst []byte, view *View) ([]byte, error) {
	return AppendPayloadAs(dst, view, Relaxed, NoLimit)
}

// HasRawPayload reports whether Payload contains the bytes of the value of the record: those of a binary or of a string, or
// none for null.
func (v *View) HasRawPayload() bool {
	switch bson.Type(v.PayloadType) {
	case bson.TypeBinary, bson.TypeString, bson.TypeNull, 0:
		return true
	}
	return false
}

// AppendPayloadAs is AppendPayload with a style for payloads that are neither binaries nor strings, and with a limit. A
// payload that would need more than most bytes causes a rejection of class message_too_large, before it has taken more memory.
func AppendPayloadAs(dst []byte, view *View, style Style, most int) ([]byte, error) {
	var out []byte
	var err error
	switch {
	case view.whole:
		out, err = appendWhole(dst, view, style, most)
	case view.HasRawPayload() && len(view.Payload) > most:
		err = ErrTooLong
	case view.HasRawPayload():
		return append(dst, view.Payload...), nil
	// Debezium's router writes only documents as JSON.
	case style == Debezium && bson.Type(view.PayloadType) != bson.TypeEmbeddedDocument:
		out, err = appendJavaText(dst, bson.Type(view.PayloadType), view.Payload, most)
	default:
		out, err = AppendValue(dst, bson.Type(view.PayloadType), view.Payload, style, most)
	}

	switch {
	case errors.Is(err, ErrTooLong):
		return dst, newTooLarge("the payload has %d bytes, and its record would exceed limits.record; at most %d are allowed", len(view.Payload), most)
	case err != nil:
		return dst, newMalformed("payload is a document whose inside is broken or nested deeper than %d", maxDepth)
	}
	return out, nil
}
