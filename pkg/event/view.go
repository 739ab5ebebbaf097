package event

import (
	"encoding/hex"
	"strconv"

	"go.mongodb.org/mongo-driver/v2/bson"
)

// View is a stored envelope as Parse found it. Its slices alias the document or the View itself: do not keep one longer
// than the document's bytes, and do not copy a View.
type View struct {
	Raw []byte // the whole document

	IDType byte   // BSON type of `_id`: binary (a UUID), ObjectId or string
	ID     []byte // its value: 16 bytes, 12 bytes, or the string's bytes

	AggregateType []byte
	AggregateID   []byte // canonical text
	Type          []byte

	PayloadType byte   // BSON type: binary, string, document, array or null
	Payload     []byte // the bytes of a binary or a string, or the BSON of a document or array; nil for null, a tombstone

	Key       []byte  // overriding ordering key as canonical text; nil if there is none
	Topic     []byte  // overriding topic; nil if there is none
	Partition int32   // asked-for partition, or AnyPartition
	Headers   Headers // the envelope's own headers, in their order

	ContentType, SchemaVersion, Source, Subject []byte // CloudEvents attributes; nil if absent

	Time      int64 // the event's own time, Unix milliseconds, if HasTime
	DueAt     int64 // scheduled delivery, Unix milliseconds, if HasDueAt
	ExpiresAt int64 // deliver before this, Unix milliseconds, if HasExpiresAt

	HasTime, HasDueAt, HasExpiresAt bool

	TS   bson.Timestamp // the server's stamp; zero if the envelope was not stamped
	Slot int32          // stored slot, or −1 if there is none (N28)

	State    []byte // one of the States of an exception; nil if pending
	Pos      []byte // position of an exception
	Delivery int32  // 0 for a first delivery, +1 by each requeue or replay (N7)
	Attempts int32
	NextAt   int64  // Unix milliseconds, 0 if absent
	Only     []byte // the one handler, as group/handler, that a requeued letter is for; nil is everybody (N18)

	// RelayOwned names the first field of the document that only a relay or an operator writes; nil if it has none. Such
	// fields count only in a document whose Seal is that of the state database.
	RelayOwned []byte
	Seal       []byte

	idText, keyText, versionText [36]byte // canonical text of values that are not strings
}

// AnyPartition is View.Partition when the envelope asks for none.
const AnyPartition int32 = -1

// The states that an exception may carry in its `state` field. A pending envelope has no such field, and a scheduled one
// is known by its `dueAt`.
const (
	StateRetry   = "retry"
	StateBlocked = "blocked"
	StateParked  = "parked"
)

// OrderingKey is the text by which the envelope is ordered and which becomes the record's key: Key, else AggregateID.
func (v *View) OrderingKey() []byte {
	if v.Key != nil {
		return v.Key
	}
	return v.AggregateID
}

// Tombstone reports whether the payload is null.
func (v *View) Tombstone() bool { return v.PayloadType == byte(bson.TypeNull) }

// AppendID appends the canonical text of the id: a UUID in lower-case groups, an ObjectId as 24 hexadecimal digits, a
// string as it is.
func (v *View) AppendID(dst []byte) []byte { return appendText(dst, bson.Type(v.IDType), v.ID) }

// AmbiguousID reports whether `_id` is a string whose text could be that of a UUID or an ObjectId, so that the text alone
// does not tell the BSON type.
func (v *View) AmbiguousID() bool {
	return v.IDType == byte(bson.TypeString) && looksBinary(v.ID)
}

// looksBinary reports whether text has the shape of a UUID or of an ObjectId, in either case of its letters.
func looksBinary(text []byte) bool {
	switch len(text) {
	case 24:
		for _, c := range text {
			if !isHex(c) {
				return false
			}
		}
		return true
	case 36:
		for i, c := range text {
			if i == 8 || i == 13 || i == 18 || i == 23 {
				if c != '-' {
					return false
				}
			} else if !isHex(c) {
				return false
			}
		}
		return true
	}
	return false
}

func isHex(c byte) bool {
	return c >= '0' && c <= '9' || c >= 'a' && c <= 'f' || c >= 'A' && c <= 'F'
}

// appendText appends the canonical text of an id, key or version; val is the value's bytes without a string's framing.
func appendText(dst []byte, t bson.Type, val []byte) []byte {
	switch t {
	case bson.TypeObjectID:
		return hex.AppendEncode(dst, val)
	case bson.TypeBinary:
		for i, n := range [...]int{4, 6, 8, 10, 16} {
			if i > 0 {
				dst = append(dst, '-')
			}
			dst = hex.AppendEncode(dst, val[[...]int{0, 4, 6, 8, 10}[i]:n])
		}
		return dst
	case bson.TypeInt32:
		return strconv.AppendInt(dst, int64(int32(le32(val))), 10)
	case bson.TypeInt64:
		return strconv.AppendInt(dst, int64(le64(val)), 10)
	default:
		return append(dst, val...)
	}
}
