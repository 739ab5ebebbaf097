package event

import (
	"encoding/binary"
	"fmt"
	"math"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/record"
)

func le32(b []byte) uint32 { return binary.LittleEndian.Uint32(b) }
func le64(b []byte) uint64 { return binary.LittleEndian.Uint64(b) }

// Parse reads a stored envelope into v in one pass. It allocates nothing unless it fails; v is overwritten and can be used
// again. The error is always a *record.Refusal: of class malformed, or partition_out_of_range for a partition that no
// topic can have. Fields that the envelope does not know are ignored, so are null optional fields; a field that appears
// twice is malformed.
func Parse(raw []byte, v *View) error {
	*v = View{Raw: raw, Partition: AnyPartition, Slot: -1}
	c, ok := open(raw)
	if !ok {
		return malformed("the bytes are not a BSON document")
	}
	var seen fields
	for c.next() {
		f := fieldOf(c.name)
		if f == 0 {
			continue
		}
		if seen&f != 0 {
			return malformed("field %s appears twice", c.name)
		}
		seen |= f
		if err := v.set(f, &c); err != nil {
			return err
		}
	}
	if c.bad {
		return malformed("the document is broken near field %q", clip(c.name))
	}
	return v.complete()
}

// fields is a set of the envelope's fields.
type fields uint32

const (
	fID fields = 1 << iota
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
	fState
	fPos
	fDelivery
	fAttempts
	fNextAt
	fOnly
	fSeal
)

// relayOwned are the fields by which a document changes where, when or as which delivery it is published.
const relayOwned = fState | fDelivery | fOnly

// fieldOf is the field of that name, 0 for one that the envelope does not know.
func fieldOf(name []byte) fields {
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
	case "state":
		return fState
	case "pos":
		return fPos
	case "delivery":
		return fDelivery
	case "attempts":
		return fAttempts
	case "nextAt":
		return fNextAt
	case "only":
		return fOnly
	case "seal":
		return fSeal
	}
	return 0
}

// set takes one known field.
func (v *View) set(f fields, c *cursor) error {
	switch f {
	case fID:
		return v.setID(c)
	case fPayload:
		return v.setPayload(c)
	case fAggregateType:
		return setString(&v.AggregateType, c)
	case fAggregateID:
		return setText(&v.AggregateID, &v.idText, c)
	case fType:
		return setString(&v.Type, c)
	case fKey:
		return setText(&v.Key, &v.keyText, c)
	case fTopic:
		return setString(&v.Topic, c)
	case fPartition:
		return v.setPartition(c)
	case fHeaders:
		return v.setHeaders(c)
	case fContentType:
		return setString(&v.ContentType, c)
	case fSchemaVersion:
		return setText(&v.SchemaVersion, &v.versionText, c)
	case fSource:
		return setString(&v.Source, c)
	case fSubject:
		return setString(&v.Subject, c)
	case fTime:
		return setDate(&v.Time, &v.HasTime, c)
	case fDueAt:
		return setDate(&v.DueAt, &v.HasDueAt, c)
	case fExpiresAt:
		return setDate(&v.ExpiresAt, &v.HasExpiresAt, c)
	default:
		return v.setOwn(f, c)
	}
}

// setOwn takes the fields that the server or the relay writes. A stamp or a slot of another type counts as missing (N25,
// N28); so do the fields of an exception, which mean nothing without a state.
func (v *View) setOwn(f fields, c *cursor) error {
	if f&relayOwned != 0 && v.RelayOwned == nil && c.typ != bson.TypeNull {
		v.RelayOwned = c.name
	}
	switch f {
	case fTS:
		if c.typ == bson.TypeTimestamp {
			v.TS = bson.Timestamp{T: le32(c.val[4:]), I: le32(c.val)}
		}
	case fSlot: // N28
		if n, ok := integer(c); ok && n >= 0 && n < Slots {
			v.Slot = int32(n)
		}
	case fState:
		return v.setState(c)
	case fDelivery:
		n, ok := integer(c)
		if c.typ != bson.TypeNull && (!ok || n < 0 || n > math.MaxInt32) {
			return malformed("delivery is not a count")
		}
		v.Delivery = int32(n)
	case fPos:
		if c.typ == bson.TypeString {
			v.Pos = text(c.val)
		}
	case fOnly:
		if c.typ == bson.TypeString {
			v.Only = text(c.val)
		}
	case fSeal:
		if c.typ == bson.TypeBinary {
			v.Seal, _, _ = blob(c.val)
		}
	case fAttempts:
		if n, ok := integer(c); ok && n >= 0 && n <= math.MaxInt32 {
			v.Attempts = int32(n)
		}
	case fNextAt:
		if c.typ == bson.TypeDateTime {
			v.NextAt = int64(le64(c.val))
		}
	}
	return nil
}

func (v *View) setID(c *cursor) error {
	switch c.typ {
	case bson.TypeString:
		if v.ID = text(c.val); len(v.ID) > maxID {
			return malformed("_id has %d bytes; at most %d are allowed", len(v.ID), maxID)
		}
	case bson.TypeObjectID:
		v.ID = c.val
	case bson.TypeBinary:
		id, subtype, ok := blob(c.val)
		if !ok || subtype != bson.TypeBinaryUUID || len(id) != 16 {
			return malformed("_id is a binary of subtype %d and %d bytes; a UUID is subtype 4 and 16 bytes", subtype, len(id))
		}
		v.ID = id
	default:
		return malformed("_id is %s; a UUID, an ObjectId or a string is wanted", typeName(c.typ))
	}
	v.IDType = byte(c.typ)
	return nil
}

func (v *View) setPayload(c *cursor) error {
	switch c.typ {
	case bson.TypeBinary:
		data, _, ok := blob(c.val)
		if !ok {
			return malformed("payload is a broken binary")
		}
		v.Payload = data
	case bson.TypeString:
		v.Payload = text(c.val)
	case bson.TypeEmbeddedDocument, bson.TypeArray:
		v.Payload = c.val
	case bson.TypeNull:
	default:
		return malformed("payload is %s; a binary, string, document, array or null is wanted", typeName(c.typ))
	}
	v.PayloadType = byte(c.typ)
	return nil
}

func (v *View) setPartition(c *cursor) error {
	if c.typ == bson.TypeNull {
		return nil
	}
	n, ok := integer(c)
	switch {
	case !ok:
		return malformed("partition is %s; an integer is wanted", typeName(c.typ))
	case n < -1 || n > math.MaxInt32:
		return &record.Refusal{Class: record.PartitionOutOfRange, Reason: fmt.Sprintf("partition %d", n)}
	}
	v.Partition = int32(n)
	return nil
}

func (v *View) setHeaders(c *cursor) error {
	switch c.typ {
	case bson.TypeNull:
		return nil
	case bson.TypeArray, bson.TypeEmbeddedDocument:
		v.Headers = Headers{raw: c.val, isDoc: c.typ == bson.TypeEmbeddedDocument}
	default:
		return malformed("headers is %s; an array of {k, v} or a document of strings is wanted", typeName(c.typ))
	}
	if why := v.Headers.check(); why != "" {
		return malformed("%s", why)
	}
	return nil
}

func (v *View) setState(c *cursor) error {
	if c.typ == bson.TypeNull {
		return nil
	}
	if c.typ == bson.TypeString {
		v.State = text(c.val)
		switch string(v.State) {
		case StateRetry, StateBlocked, StateParked:
			return nil
		}
	}
	return malformed("state is not one of %s, %s, %s", StateRetry, StateBlocked, StateParked)
}

// complete checks what only the whole document shows.
func (v *View) complete() error {
	switch {
	case v.IDType == 0 || len(v.ID) == 0:
		return malformed("field _id is missing or empty")
	case len(v.AggregateType) == 0:
		return malformed("field aggregatetype is missing or empty")
	case len(v.AggregateID) == 0:
		return malformed("field aggregateid is missing or empty")
	case len(v.Type) == 0:
		return malformed("field type is missing or empty")
	case v.PayloadType == 0:
		return malformed("field payload is missing; null makes a tombstone")
	}
	return nil
}

// setString takes a string; null and the empty string count as absent.
func setString(dst *[]byte, c *cursor) error {
	switch c.typ {
	case bson.TypeNull:
		return nil
	case bson.TypeString:
		if s := text(c.val); len(s) > 0 {
			*dst = s
		}
		return nil
	}
	return malformed("%s is %s; a string is wanted", c.name, typeName(c.typ))
}

// setText takes whatever has a canonical text, which is kept in buf where it is not there already.
func setText(dst *[]byte, buf *[36]byte, c *cursor) error {
	val := c.val
	switch c.typ {
	case bson.TypeString, bson.TypeNull:
		return setString(dst, c)
	case bson.TypeInt32, bson.TypeInt64, bson.TypeObjectID:
	case bson.TypeBinary:
		id, subtype, ok := blob(c.val)
		if !ok || subtype != bson.TypeBinaryUUID || len(id) != 16 {
			return malformed("%s is a binary that is not a UUID of subtype 4", c.name)
		}
		val = id
	default:
		return malformed("%s is %s; a string, int, long, ObjectId or UUID is wanted", c.name, typeName(c.typ))
	}
	*dst = appendText(buf[:0], c.typ, val)
	return nil
}

func setDate(dst *int64, has *bool, c *cursor) error {
	switch c.typ {
	case bson.TypeNull:
		return nil
	case bson.TypeDateTime:
		*dst, *has = int64(le64(c.val)), true
		return nil
	}
	return malformed("%s is %s; a date is wanted", c.name, typeName(c.typ))
}

// integer takes a whole number of any numeric type: JavaScript writers store doubles.
func integer(c *cursor) (int64, bool) {
	switch c.typ {
	case bson.TypeInt32:
		return int64(int32(le32(c.val))), true
	case bson.TypeInt64:
		return int64(le64(c.val)), true
	case bson.TypeDouble:
		f := math.Float64frombits(le64(c.val))
		if f == math.Trunc(f) && math.Abs(f) < 1<<53 {
			return int64(f), true
		}
	}
	return 0, false
}

func malformed(format string, args ...any) error {
	return &record.Refusal{Class: record.Malformed, Reason: fmt.Sprintf(format, args...)}
}

// clip keeps a reason short whatever a document's names are.
func clip(name []byte) []byte { return name[:min(len(name), 64)] }

// typeName names a BSON type for people.
func typeName(t bson.Type) string {
	if s := t.String(); s != "invalid" {
		return "of type " + s
	}
	return fmt.Sprintf("of unknown type 0x%02x", byte(t))
}
