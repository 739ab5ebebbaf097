package fence

import (
	"crypto/sha256"
	"encoding/binary"
	"slices"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/contract/envelope"
	"github.com/outrelay/outrelay/internal/contract/record"
)

// Identity names a delivery within a partition: a digest of the record headers `id` (or `outrelay-id`, if the record has
// it), `outrelay-id-type`, `outrelay-ns`, `outrelay-delivery` and `outrelay-position` (N7). Equal ids of different BSON types,
// namespaces or deliveries have different identities, and so have events with equal ids that were sent out of the store.
type Identity [16]byte

// identityHeaders are the headers of an identity, in the order in which they are digested.
var identityHeaders = [...]string{record.HeaderID, record.HeaderIDType, record.HeaderNamespace, record.HeaderDelivery, record.HeaderPosition}

// position is the index of record.HeaderPosition.
const position = len(identityHeaders) - 1

// identityValues are the values of the identity headers. The first header of a name counts.
type identityValues struct {
	value [len(identityHeaders)][]byte
	has   [len(identityHeaders)]bool

	documentID []byte // replaces the id
}

func (x *identityValues) addHeader(key, value []byte) {
	for i, name := range identityHeaders {
		if string(key) == name && !x.has[i] {
			x.value[i], x.has[i] = value, true
		}
	}

	// Only the `_id` of a document is unique. With a mapping, the header id may come from another field.
	if string(key) == record.HeaderDocumentID && x.documentID == nil {
		x.documentID = value
	}
}

// digest returns false for a record without an id, which is not a delivery of the relay.
func (x *identityValues) digest() (Identity, bool) {
	if !x.has[0] {
		return Identity{}, false
	}
	if x.documentID != nil {
		x.value[0] = x.documentID
	}

	// The preset debezium writes a UUID as base64. Its records have the same identity as those of the other presets.
	var uuid [36]byte
	documentID := x.value[0]
	if id, ok := envelope.UUIDOfBase64(documentID); ok && !x.has[1] {
		documentID = envelope.AppendText(uuid[:0], bson.TypeBinary, id[:])
	}

	// Ids are short. A longer one costs an allocation.
	var room [192]byte
	data := room[:0]
	for i := range identityHeaders {
		if !x.has[i] {
			// A missing header and an empty one are different identities.
			data = append(data, 0)
			continue
		}
		value := x.value[i]
		if i == 0 {
			value = documentID
		}
		data = append(data, 1)
		// With its length, no value can be read as a part of the next one.
		data = binary.AppendUvarint(data, uint64(len(value)))
		data = append(data, value...)
	}
	full := sha256.Sum256(data)
	return Identity(full[:16]), true
}

// IdentityOf returns the identity of a record that is sent or was read. It returns false if the record has no header `id`.
func IdentityOf(headers []record.Header) (Identity, bool) {
	var values identityValues
	for i := range headers {
		values.addHeader(headers[i].Key, headers[i].Value)
	}
	return values.digest()
}

// EachHit calls visit with the identities and times that a record of the event of rec may have, until visit returns true. Of the records
// that were sent out of the stream, only their time distinguishes two events that have used one id.
func EachHit(rec *record.Record, visit func(id Identity, timeMS int64) bool) {
	var values identityValues
	for i := range rec.Headers {
		values.addHeader(rec.Headers[i].Key, rec.Headers[i].Value)
	}
	id, ok := values.digest()
	if !ok {
		return
	}
	streamMS, isOfStream := rec.Sent.StreamMS, rec.Sent.StreamMS != 0
	if values.has[position] {
		if visit(id, AnyTime) {
			return
		}
		values.has[position] = false
	} else {
		streamMS, isOfStream = rec.TimeMS, true
	}

	if rec.Sent.AnyTime {
		streamMS, isOfStream = AnyTime, true
	}
	if id, _ = values.digest(); isOfStream && visit(id, streamMS) {
		return
	}
	var room [record.PositionSize]byte
	for _, pos := range rec.Sent.Positions {
		if pos == nil {
			continue
		}
		values.has[position], values.value[position] = true, record.AppendPositionDigest(room[:0], pos)
		if id, _ = values.digest(); visit(id, AnyTime) {
			return
		}
	}
}

// AnyTime is the time of a record whose time is unknown, because the topic stores that of the append. It equals every other time.
const AnyTime = -1

// Known is the multiset of deliveries that were read back from one partition, each with its offset and its time. It
// is not safe for concurrent use. The methods accept a nil *Known, which is empty.
type Known struct {
	single  map[Identity]hit
	several map[Identity][]hit // of identities with more than one record, by offset
	n       int
}

// hit is a record.
type hit struct {
	offset, timeMS int64
}

func (h hit) hasTime(timeMS int64) bool {
	return h.timeMS == timeMS || h.timeMS == AnyTime || timeMS == AnyTime
}

// Len returns the number of records.
func (k *Known) Len() int {
	if k == nil {
		return 0
	}
	return k.n
}

// Take removes the record of a delivery with this time that has the lowest offset, and returns the offset. It does not
// allocate.
func (k *Known) Take(id Identity, timeMS int64) (offset int64, ok bool) {
	if offset, ok = k.At(id, timeMS); !ok {
		return 0, false
	}

	k.n--
	if _, isSingle := k.single[id]; isSingle {
		delete(k.single, id)
		return offset, true
	}
	list := slices.DeleteFunc(k.several[id], func(h hit) bool { return h.offset == offset })
	if len(list) > 1 {
		k.several[id] = list
		return offset, true
	}
	delete(k.several, id)
	k.single[id] = list[0]
	return offset, true
}

// At returns the lowest offset of a delivery with this time, without removing it.
func (k *Known) At(id Identity, timeMS int64) (offset int64, ok bool) {
	if k.Len() == 0 {
		return 0, false
	}
	if single, ok := k.single[id]; ok {
		return single.offset, single.hasTime(timeMS)
	}
	for _, h := range k.several[id] {
		if h.hasTime(timeMS) {
			return h.offset, true
		}
	}
	return 0, false
}

// Has reports whether the multiset contains the delivery.
func (k *Known) Has(id Identity, timeMS int64) bool {
	_, ok := k.At(id, timeMS)
	return ok
}

// Add adds a record. The offsets of a delivery must be added in ascending order.
func (k *Known) Add(id Identity, offset, timeMS int64) {
	k.n++
	if k.single == nil {
		k.single, k.several = map[Identity]hit{}, map[Identity][]hit{}
	}
	first, isSingle := k.single[id]
	switch {
	case isSingle:
		delete(k.single, id)
		k.several[id] = []hit{first, {offset, timeMS}}
	case len(k.several[id]) > 0:
		k.several[id] = append(k.several[id], hit{offset, timeMS})
	default:
		k.single[id] = hit{offset, timeMS}
	}
}
