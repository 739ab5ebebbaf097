package fence

import (
	"crypto/sha256"
	"encoding/binary"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/contract/envelope"
	"github.com/outrelay/outrelay/internal/contract/record"
)

// Identity names a delivery within a partition: a digest of the record headers `id` (or `outrelay-id`, if the record has
// it), `outrelay-id-type`, `outrelay-ns` and `outrelay-delivery` (N7). Equal ids of different BSON types, namespaces or deliveries
// have different identities.
type Identity [16]byte

// identityHeaders are the headers of an identity, in the order in which they are digested.
var identityHeaders = [...]string{record.HeaderID, record.HeaderIDType, record.HeaderNamespace, record.HeaderDelivery}

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

// Known is the multiset of deliveries that were read back from one partition, each with its offset. It
// is not safe for concurrent use. The methods accept a nil *Known, which is empty.
type Known struct {
	first map[Identity]int64
	more  map[Identity][]int64 // further offsets of the same delivery, ascending
	n     int
}

// Len returns the number of records.
func (k *Known) Len() int {
	if k == nil {
		return 0
	}
	return k.n
}

// Take removes the record of a delivery that has the lowest offset, and returns the offset. It does not
// allocate.
func (k *Known) Take(id Identity) (offset int64, ok bool) {
	if offset, ok = k.At(id); !ok {
		return 0, false
	}

	k.n--
	rest := k.more[id]
	if len(rest) == 0 {
		delete(k.first, id)
		return offset, true
	}
	k.first[id] = rest[0]
	if len(rest) == 1 {
		delete(k.more, id)
	} else {
		k.more[id] = rest[1:]
	}
	return offset, true
}

// At returns the lowest offset of a delivery, without removing it.
func (k *Known) At(id Identity) (offset int64, ok bool) {
	if k.Len() == 0 {
		return 0, false
	}
	offset, ok = k.first[id]
	return offset, ok
}

// Has reports whether the multiset contains the delivery.
func (k *Known) Has(id Identity) bool {
	_, ok := k.At(id)
	return ok
}

// Add adds a record. The offsets of a delivery must be added in ascending order.
func (k *Known) Add(id Identity, offset int64) {
	k.n++
	if _, dup := k.first[id]; dup {
		if k.more == nil {
			k.more = map[Identity][]int64{}
		}
		k.more[id] = append(k.more[id], offset)
		return
	}
	if k.first == nil {
		k.first = map[Identity]int64{}
	}
	k.first[id] = offset
}
