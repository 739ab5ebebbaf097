package envelope

import (
	"encoding/binary"
	"fmt"
	"math"
	"strconv"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/contract/keyhash"
	"github.com/outrelay/outrelay/internal/contract/record"
)

func uint32LE(data []byte) uint32 { return binary.LittleEndian.Uint32(data) }
func uint64LE(data []byte) uint64 { return binary.LittleEndian.Uint64(data) }

// Parse reads the stored envelope raw into view, in one pass and without allocation unless it fails. view
// is overwritten, so one View can be used for many envelopes.
//
// The error is always a *record.Rejection: of class partition_out_of_range for a partition that no
// topic can have, of class message_too_large for an id, a text or headers that exceed their limit,
// otherwise of class malformed. Its class is that of the first fault, and its reason names all of them. Unknown fields and optional fields that are null
// are ignored. A field that appears twice is malformed.
func Parse(raw []byte, view *View) error { return (*Mapping)(nil).Parse(raw, view) }

// Parse is like the function [Parse], for documents with other field names.
func (m *Mapping) Parse(raw []byte, view *View) error {
	*view = View{Raw: raw, Partition: AnyPartition, Slot: -1, Mapped: Mapped{keyBuf: view.keyBuf, java: m != nil && m.java}}
	cursor, ok := openDocument(raw)
	if !ok {
		return newMalformed("the bytes are not a BSON document")
	}

	var seen fieldSet
	for cursor.next() {
		var set fieldSet
		if m == nil {
			set = fieldByName(cursor.name)
		} else {
			set = m.partsOf(view, &cursor)
		}

		// The document may contain fields of other programs.
		if set == 0 {
			continue
		}
		// Which of two values counts depends on the reader, so such a document is ambiguous.
		if seen&set != 0 {
			return newMalformed("field %s appears twice", cursor.name)
		}

		seen |= set

		// With a mapping, a field may hold several parts.
		for set&(set-1) != 0 {
			// The lowest bit is one part.
			one := set & -set
			if err := view.setField(one, &cursor); err != nil {
				return m.rejectFields(raw, err)
			}
			set &^= one
		}
		if err := view.setField(set, &cursor); err != nil {
			return m.rejectFields(raw, err)
		}
	}

	if cursor.broken {
		return newMalformed("the document is broken near field %q", clipName(cursor.name))
	}
	if view.lacks(m.requiredParts()) != 0 {
		return m.rejectFields(raw, nil)
	}
	if m == nil {
		return nil
	}
	return m.derive(view)
}

// fieldSet is a set of fields of the envelope.
type fieldSet uint32

const (
	fID fieldSet = 1 << iota
	fAggregateType
	fAggregateID
	fType
	fPayload
	fKey
	fTopic
	fPartition
	fHeaders
	fContentType
	fSchemaVersion
	fSource
	fSubject
	fTime
	fTS
	fSlot
	fDueAt
	fExpiresAt

	// Parts that only a mapping has.
	fEventID
	fTimestamp
)

// fieldByName returns the field called name, or 0 if the envelope has no such field.
func fieldByName(name []byte) fieldSet {
	switch string(name) {
	case "_id":
		return fID
	case "aggregatetype":
		return fAggregateType
	case "aggregateid":
		return fAggregateID
	case "type":
		return fType
	case "payload":
		return fPayload
	case "key":
		return fKey
	case "topic":
		return fTopic
	case "partition":
		return fPartition
	case "headers":
		return fHeaders
	case "contenttype":
		return fContentType
	case "schemaversion":
		return fSchemaVersion
	case "source":
		return fSource
	case "subject":
		return fSubject
	case "time":
		return fTime
	case "ts":
		return fTS
	case "slot":
		return fSlot
	case "dueAt":
		return fDueAt
	case "expiresAt":
		return fExpiresAt
	}

	return 0
}

// setField sets the field set from the value at cursor.
func (v *View) setField(set fieldSet, cursor *cursor) error {
	switch set {
	case fID:
		return v.setID(cursor)
	case fPayload:
		return v.setPayload(cursor)

	// The parts that select the topic, the key and the partition.
	case fAggregateType:
		return setString(&v.AggregateType, cursor)
	case fAggregateID:
		return v.setKey(&v.AggregateID, &v.idText, cursor)
	case fType:
		// Debezium's router does not read the type.
		if v.java && cursor.typ != bson.TypeString {
			return nil
		}
		return setString(&v.Type, cursor)
	case fKey:
		return v.setKey(&v.Key, &v.keyText, cursor)
	case fTopic:
		return setString(&v.Topic, cursor)
	case fPartition:
		return v.setPartition(cursor)
	case fHeaders:
		return v.setHeaders(cursor)

	// The attributes of CloudEvents.
	case fContentType:
		return setString(&v.ContentType, cursor)
	case fSchemaVersion:
		return setText(&v.SchemaVersion, &v.versionText, cursor)
	case fSource:
		return setString(&v.Source, cursor)
	case fSubject:
		return setString(&v.Subject, cursor)
	case fTime:
		return setDate(&v.Time, &v.HasTime, cursor)

	// The times of delivery, and the parts that only a mapping has.
	case fDueAt:
		return setDate(&v.DueAt, &v.HasDueAt, cursor)
	case fExpiresAt:
		return setDate(&v.ExpiresAt, &v.HasExpiresAt, cursor)
	case fEventID:
		return v.setEventID(cursor)
	case fTimestamp:
		return v.setTimestamp(cursor)
	default:
		v.setRelayField(set, cursor)
		return nil
	}
}

// setRelayField sets a field that the server or the relay writes. A timestamp or a slot of the
// wrong type counts as missing (N25, N28).
func (v *View) setRelayField(set fieldSet, cursor *cursor) {
	switch set {
	case fTS:
		if cursor.typ == bson.TypeTimestamp {
			v.TS = bson.Timestamp{T: uint32LE(cursor.val[4:]), I: uint32LE(cursor.val)}
		}
	case fSlot: // N28
		if n, ok := integerValue(cursor); ok && n >= 0 && n < keyhash.Slots {
			v.Slot = int32(n)
		}
	}
}

// MaxIDBytes is the largest length of an id that is a string. A change event contains the _id three
// times, and must not exceed the limit of the server.
const MaxIDBytes = 1024

// standardUUIDs is the fix for UUIDs that every reader understands.
const standardUUIDs = "let the writer store UUIDs with uuidRepresentation=standard"

// ParseID returns the bytes of an id that is stored as a BSON value: those of a UUID, an ObjectId or a
// string. It fails for other types and for invalid values.
func ParseID(bsonType bson.Type, value []byte) ([]byte, error) {
	if n := valueLen(bsonType, value); n < 0 || n != len(value) {
		return nil, newMalformed("the value is broken")
	}

	var view View
	err := view.setID(&cursor{typ: bsonType, name: []byte("_id"), val: value})
	return view.ID, err
}

// setID sets the id, which must be a string, an ObjectId or a UUID.
func (v *View) setID(cursor *cursor) error {
	switch cursor.typ {
	case bson.TypeString:
		v.ID = StringBytes(cursor.val)
		if err := checkText(cursor.name, len(v.ID), MaxIDBytes); err != nil {
			return err
		}
	case bson.TypeObjectID:
		v.ID = cursor.val
	case bson.TypeBinary:
		id, subtype, ok := binaryData(cursor.val)
		switch {
		case ok && subtype == bson.TypeBinaryUUIDOld:
			return newMalformed("_id is a UUID of the legacy subtype 3, whose byte order depends on the driver; " + standardUUIDs)
		case !ok || subtype != bson.TypeBinaryUUID || len(id) != 16:
			return newMalformed("_id is a binary of subtype %d and %d bytes; a UUID is subtype 4 and 16 bytes", subtype, len(id))
		}
		v.ID = id
	default:
		return newMalformed("_id is %s; a UUID, an ObjectId or a string is wanted", typeName(cursor.typ))
	}

	v.IDType = byte(cursor.typ)
	return nil
}

// setPayload sets the payload, without checking the inside of a document.
func (v *View) setPayload(cursor *cursor) error {
	switch cursor.typ {
	case bson.TypeBinary:
		data, _, ok := binaryData(cursor.val)
		if !ok {
			return newMalformed("%s is a broken binary", cursor.name)
		}
		v.Payload = data
	case bson.TypeString:
		v.Payload = StringBytes(cursor.val)
	case bson.TypeEmbeddedDocument, bson.TypeArray:
		v.Payload = cursor.val
	case bson.TypeNull:
	default:
		if v.java {
			v.Payload = cursor.val
			break
		}
		return newMalformed("%s is %s; a binary, string, document, array or null is wanted", cursor.name, typeName(cursor.typ))
	}

	v.PayloadType = byte(cursor.typ)
	return nil
}

// setPartition sets the partition. −1 is allowed and means that there is none.
func (v *View) setPartition(cursor *cursor) error {
	if cursor.typ == bson.TypeNull {
		return nil
	}

	n, ok := integerValue(cursor)
	switch {
	case !ok:
		return newMalformed("%s is %s; an integer is wanted", cursor.name, typeName(cursor.typ))
	case n < -1 || n > math.MaxInt32:
		return &record.Rejection{Class: record.PartitionOutOfRange, Reason: fmt.Sprintf("%s %d", cursor.name, n)}
	}

	v.Partition = int32(n)
	return nil
}

// setHeaders sets the headers after checking all of them.
func (v *View) setHeaders(cursor *cursor) error {
	switch cursor.typ {
	case bson.TypeNull:
		return nil
	case bson.TypeArray, bson.TypeEmbeddedDocument:
		v.Headers = Headers{raw: cursor.val, isDoc: cursor.typ == bson.TypeEmbeddedDocument}
	default:
		return newMalformed("%s is %s; an array of {k, v} or a document of strings is wanted", cursor.name, typeName(cursor.typ))
	}

	return v.Headers.check()
}

// lacks returns the required parts that are missing or empty.
func (v *View) lacks(required fieldSet) (missing fieldSet) {
	if v.IDType == 0 || len(v.ID) == 0 {
		missing |= fID
	}
	if len(v.EventID) == 0 {
		missing |= fEventID
	}
	if len(v.AggregateType) == 0 {
		missing |= fAggregateType
	}
	if len(v.AggregateID) == 0 {
		missing |= fAggregateID
	}
	if len(v.Type) == 0 {
		missing |= fType
	}
	if v.PayloadType == 0 {
		missing |= fPayload
	}
	return missing & required
}

// setString sets dst to a string. Null and the empty string count as absent.
func setString(dst *[]byte, cursor *cursor) error {
	switch cursor.typ {
	case bson.TypeNull:
		return nil
	case bson.TypeString:
		text := StringBytes(cursor.val)
		if err := checkText(cursor.name, len(text), MaxFieldText); err != nil {
			return err
		}
		if len(text) > 0 {
			*dst = text
		}
		return nil
	}

	return newMalformed("%s is %s; a string is wanted", cursor.name, typeName(cursor.typ))
}

// setText sets dst to the canonical text of a string, a whole number, an ObjectId or a UUID. The text of
// a value that is not a string is stored in buf.
func setText(dst *[]byte, buf *[36]byte, cursor *cursor) error {
	val := cursor.val
	switch cursor.typ {
	case bson.TypeString, bson.TypeNull:
		// A string is its own canonical text, so it needs no buffer.
		return setString(dst, cursor)
	case bson.TypeInt32, bson.TypeInt64, bson.TypeObjectID:
	case bson.TypeDouble:
		// A driver of JavaScript stores a whole number above 2³¹ as a double. Its text is that of the number.
		if n, ok := integerValue(cursor); ok {
			*dst = strconv.AppendInt(buf[:0], n, 10)
			return nil
		}
		return newMalformed("%s is a double that is not a whole number within ±2⁵³; a string, int, long, ObjectId or UUID is wanted", cursor.name)
	case bson.TypeBinary:
		id, subtype, ok := binaryData(cursor.val)
		if !ok || subtype != bson.TypeBinaryUUID || len(id) != 16 {
			return newMalformed("%s is a binary that is not a UUID of subtype 4; "+standardUUIDs, cursor.name)
		}
		val = id
	default:
		return newMalformed("%s is %s; a string, int, long, ObjectId or UUID is wanted", cursor.name, typeName(cursor.typ))
	}

	*dst = AppendText(buf[:0], cursor.typ, val)
	return nil
}

// setDate sets a date in Unix milliseconds. Null counts as absent.
func setDate(dst *int64, has *bool, cursor *cursor) error {
	switch cursor.typ {
	case bson.TypeNull:
		return nil
	case bson.TypeDateTime:
		*dst, *has = int64(uint64LE(cursor.val)), true
		return nil
	}
	return newMalformed("%s is %s; a date is wanted", cursor.name, typeName(cursor.typ))
}

// integerValue returns a whole number of any numeric type. JavaScript stores whole numbers as
// doubles.
func integerValue(cursor *cursor) (int64, bool) {
	switch cursor.typ {
	case bson.TypeInt32:
		return int64(int32(uint32LE(cursor.val))), true
	case bson.TypeInt64:
		return int64(uint64LE(cursor.val)), true
	case bson.TypeDouble:
		return wholeNumber(math.Float64frombits(uint64LE(cursor.val)))
	}

	return 0, false
}

// wholeNumber returns number as an integer, if it is a whole number. Beyond ±2⁵³, doubles do not represent all whole numbers.
func wholeNumber(number float64) (int64, bool) {
	if number != math.Trunc(number) || math.Abs(number) > 1<<53 {
		return 0, false
	}
	return int64(number), true
}
