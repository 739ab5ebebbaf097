package event

import (
	"encoding/binary"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/contract/envelope"
	"github.com/outrelay/outrelay/internal/contract/eventid"
	"github.com/outrelay/outrelay/internal/contract/keyhash"
)

// MarshalBSON returns the envelope as it is stored, or the error of Validate. The field `ts` is a
// placeholder that the server replaces by its timestamp at the insert.
func (e Event) MarshalBSON() ([]byte, error) {
	if err := e.Validate(); err != nil {
		return nil, err
	}
	return e.encode(), nil
}

// Size returns the size of the stored envelope in bytes, which outbox.WithMaxSize limits. It
// encodes the envelope.
func (e Event) Size() int { return len(e.encode()) }

// encode returns the envelope without validating it.
func (e Event) encode() []byte {
	dst := appendInt32(make([]byte, 0, envelopeOverhead+len(e.payload.data)), 0)
	if !e.id.IsZero() {
		typ, _ := eventid.Parts(e.id)
		dst = eventid.AppendValue(appendName(dst, typ, "_id"), e.id)
	}

	dst = appendString(dst, "aggregatetype", e.about.Type)
	dst = appendString(dst, "aggregateid", e.about.ID)
	dst = appendString(dst, "type", e.name)
	dst = appendPayload(dst, e.payload)

	dst = appendOptional(dst, "key", e.key)
	dst = appendOptional(dst, "topic", e.topic)
	if e.partition != envelope.AnyPartition {
		dst = appendInt32(appendName(dst, bson.TypeInt32, "partition"), e.partition)
	}

	dst = appendHeaders(dst, e.headers)
	dst = appendOptional(dst, "contenttype", e.payload.contentType)
	dst = appendOptional(dst, "schemaversion", e.schemaVersion)
	dst = appendOptional(dst, "source", e.source)
	dst = appendOptional(dst, "subject", e.subject)
	dst = appendDate(dst, "time", e.time)
	dst = appendDate(dst, "dueAt", e.dueAt)
	dst = appendDate(dst, "expiresAt", e.expiresAt)
	// With a zero timestamp, the server sets its own one at the insert.
	dst = appendInt64(appendName(dst, bson.TypeTimestamp, "ts"), 0)
	dst = appendInt32(appendName(dst, bson.TypeInt32, "slot"), keyhash.Slot([]byte(e.Key()))) // N28
	return closeDocument(dst, 0)
}

// envelopeOverhead is an estimate of the bytes of an envelope without its payload.
const envelopeOverhead = 512

// appendPayload appends the payload. Documents and arrays are BSON values already.
func appendPayload(dst []byte, payload Payload) []byte {
	bsonType := payload.typ
	// A payload without a type is a tombstone: the record has no value.
	if bsonType == 0 {
		bsonType = bson.TypeNull
	}

	dst = appendName(dst, bsonType, "payload")
	switch bsonType {
	case bson.TypeBinary:
		return appendBinaryValue(dst, payload.data)
	case bson.TypeString:
		return appendStringValue(dst, payload.data)
	default:
		return append(dst, payload.data...)
	}
}

// appendHeaders appends the headers as an array of {k, v}, or nothing if there are none.
func appendHeaders(dst []byte, hs []Header) []byte {
	if len(hs) == 0 {
		return dst
	}

	dst = appendName(dst, bson.TypeArray, "headers")
	start := len(dst)
	dst = appendInt32(dst, 0)

	// The keys of a BSON array are its indexes as texts.
	var index [20]byte
	for i, h := range hs {
		name := envelope.AppendText(index[:0], bson.TypeInt32, binary.LittleEndian.AppendUint32(nil, uint32(i)))

		dst = appendName(dst, bson.TypeEmbeddedDocument, string(name))
		pair := len(dst)
		dst = appendInt32(dst, 0)

		dst = appendString(dst, "k", h.Key)
		if h.Value == nil {
			dst = appendName(dst, bson.TypeNull, "v")
		} else {
			dst = appendBinaryValue(appendName(dst, bson.TypeBinary, "v"), h.Value)
		}
		dst = closeDocument(dst, pair)
	}

	return closeDocument(dst, start)
}

// closeDocument ends the document that begins at start, and sets its length.
func closeDocument(dst []byte, start int) []byte {
	dst = append(dst, 0)
	binary.LittleEndian.PutUint32(dst[start:], uint32(len(dst)-start))
	return dst
}

func appendName(dst []byte, bsonType bson.Type, name string) []byte {
	return append(append(append(dst, byte(bsonType)), name...), 0)
}

func appendInt32(dst []byte, n int32) []byte { return binary.LittleEndian.AppendUint32(dst, uint32(n)) }

func appendInt64(dst []byte, n int64) []byte { return binary.LittleEndian.AppendUint64(dst, uint64(n)) }

func appendString(dst []byte, name, value string) []byte {
	return appendStringValue(appendName(dst, bson.TypeString, name), value)
}

// appendOptional appends a string, or nothing if it is empty.
func appendOptional(dst []byte, name, value string) []byte {
	if value == "" {
		return dst
	}
	return appendString(dst, name, value)
}

// appendDate appends a date with millisecond precision, or nothing if it is zero.
func appendDate(dst []byte, name string, moment time.Time) []byte {
	if moment.IsZero() {
		return dst
	}
	return appendInt64(appendName(dst, bson.TypeDateTime, name), moment.UnixMilli())
}

func appendStringValue[T string | []byte](dst []byte, text T) []byte {
	return append(append(appendInt32(dst, int32(len(text)+1)), text...), 0)
}

func appendBinaryValue(dst, data []byte) []byte {
	return append(append(appendInt32(dst, int32(len(data))), bson.TypeBinaryGeneric), data...)
}
