package envelope

import (
	"encoding/hex"
	"strconv"

	"go.mongodb.org/mongo-driver/v2/bson"
)

// View is a stored envelope that Parse has read. Its slices alias the document or the View itself:
// do not use them longer than the bytes of the document, and do not copy a View.
type View struct {
	Raw []byte // the whole document

	IDType byte   // BSON type of `_id`: binary (a UUID), ObjectId or string
	ID     []byte // its value: 16 bytes, 12 bytes, or the bytes of the string

	AggregateType []byte
	AggregateID   []byte // canonical text
	Type          []byte

	PayloadType byte   // BSON type: binary, string, document, array or null; with java of [NewMapping], any
	Payload     []byte // bytes of a binary or string, or BSON of a document, an array or another value; nil for null, a tombstone

	Key       []byte  // key set by the event, as canonical text, or nil
	Topic     []byte  // topic set by the event, or nil
	Partition int32   // partition set by the event, or AnyPartition
	Headers   Headers // headers of the envelope, in their order

	Attributes
	Mapped

	DueAt     int64 // when a scheduled event is due, in Unix milliseconds, if HasDueAt
	ExpiresAt int64 // when the event becomes useless, in Unix milliseconds, if HasExpiresAt

	HasDueAt, HasExpiresAt bool

	// Delivery is not read from the document: the caller sets it for a requeue or a replay (N7, N18).
	Delivery int32

	TS   bson.Timestamp // timestamp of the server, or zero if the envelope has none
	Slot int32          // stored slot, or −1 if there is none (N28)

	idText, keyText, versionText, eventIDText [36]byte // canonical text of values that are not strings
}

// Attributes are the CloudEvents attributes of an envelope, nil where it has none.
type Attributes struct {
	ContentType, SchemaVersion, Source, Subject []byte

	Time    int64 // when the event happened, in Unix milliseconds, if HasTime
	HasTime bool
}

// Mapped are the parts that only a document with a mapping has.
type Mapped struct {
	// EventID is the canonical text of the id of the record, if it is not `_id`; else nil. EventUUID contains its bytes if
	// it is a UUID.
	EventID, EventUUID []byte

	RecordTime    int64 // timestamp of the record, in Unix milliseconds, if HasRecordTime
	HasRecordTime bool

	whole   bool   // the payload is the whole document, without the fields of the relay
	foreign []byte // name of a field of the relay in a whole document, or nil
	keyBuf  []byte // holds the key of the document
	java    bool   // see [NewMapping]

	markField []byte // name of a field of a mark in a whole document, or nil
	marked    bool   // the whole document has the mark of a delivery
}

// AnyPartition is the value of View.Partition if the envelope does not set a partition.
const AnyPartition int32 = -1

// OrderingKey returns the key of the record, which determines the order of events: Key, or else
// AggregateID. It aliases v.
func (v *View) OrderingKey() []byte {
	if v.Key != nil {
		return v.Key
	}
	return v.AggregateID
}

// Tombstone reports whether the payload is null, so that the record has a null value.
func (v *View) Tombstone() bool { return v.PayloadType == byte(bson.TypeNull) }

// AppendText appends the canonical text of an id, key or version. val contains the bytes of the
// value, for a string without its length and final zero.
func AppendText(dst []byte, bsonType bson.Type, val []byte) []byte {
	switch bsonType {
	case bson.TypeObjectID:
		return hex.AppendEncode(dst, val)
	case bson.TypeBinary:
		// The five groups of a UUID end at these bytes.
		for i, n := range [...]int{4, 6, 8, 10, 16} {
			if i > 0 {
				dst = append(dst, '-')
			}
			dst = hex.AppendEncode(dst, val[[...]int{0, 4, 6, 8, 10}[i]:n])
		}

		return dst
	case bson.TypeInt32:
		return strconv.AppendInt(dst, int64(int32(uint32LE(val))), 10)
	case bson.TypeInt64:
		return strconv.AppendInt(dst, int64(uint64LE(val)), 10)
	default:
		return append(dst, val...)
	}
}
