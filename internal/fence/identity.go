package fence

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"math"

	"github.com/outrelay/outrelay/internal/record"
)

// Identity names a delivery within a partition: a digest of the record headers `id`, `outrelay-id-type`, `outrelay-ns` and
// `outrelay-delivery` (N7). Two equal ids of different BSON types, namespaces or deliveries differ.
type Identity [16]byte

// identifying are the headers that make up an identity, in the order in which they are digested.
var identifying = [...]string{record.HeaderID, record.HeaderIDType, record.HeaderNamespace, record.HeaderDelivery}

// identity collects the values of the identifying headers; the first of a name counts.
type identity struct {
	value [len(identifying)][]byte
	has   [len(identifying)]bool
}

func (x *identity) add(key, value []byte) {
	for i, name := range identifying {
		if string(key) == name && !x.has[i] {
			x.value[i], x.has[i] = value, true
		}
	}
}

// sum is false for a record without an id: it is no delivery of ours.
func (x *identity) sum() (Identity, bool) {
	if !x.has[0] {
		return Identity{}, false
	}
	var room [192]byte // ids are short; a longer one costs an allocation
	b := room[:0]
	for i := range identifying {
		if !x.has[i] {
			b = append(b, 0)
			continue
		}
		b = append(b, 1)
		b = binary.AppendUvarint(b, uint64(len(x.value[i])))
		b = append(b, x.value[i]...)
	}
	full := sha256.Sum256(b)
	return Identity(full[:16]), true
}

// IdentityOf is the identity of a record that is about to be sent, by its headers; false if it has no header `id`.
func IdentityOf(headers []record.Header) (Identity, bool) {
	var same Alias
	return same.identityOf(headers)
}

// Alias is a collection whose records name it or not. A watcher of one collection leaves the header `outrelay-ns` out; when
// it becomes one of several collections, or the other way round, the records of before stand there in the other form.
type Alias struct {
	NS []byte // the value of the header; nil: there is no such collection
	// Named: the header is written now, so that a record without it is one of that collection's from before.
	Named bool
}

// identityOf is [IdentityOf] of a record that was read, in the form of now.
func (a *Alias) identityOf(headers []record.Header) (Identity, bool) {
	var x identity
	for i := range headers {
		x.add(headers[i].Key, headers[i].Value)
	}
	const ns = 2 // in identifying
	switch {
	case a.NS == nil:
	case a.Named && !x.has[ns]:
		x.value[ns], x.has[ns] = a.NS, true
	case !a.Named && bytes.Equal(x.value[ns], a.NS):
		x.has[ns] = false
	}
	return x.sum()
}

// Known is the multiset of deliveries that were read back from one partition, each with its offset. It is not safe for
// concurrent use.
type Known struct {
	first map[Identity]int64
	more  map[Identity][]int64 // further offsets of the same delivery, ascending
	n     int
}

// Len is how many records it holds.
func (k *Known) Len() int {
	if k == nil {
		return 0
	}
	return k.n
}

// Take removes the record of a delivery that stands lowest and returns its offset. It does not allocate.
func (k *Known) Take(id Identity) (offset int64, ok bool) {
	if k.Len() == 0 {
		return 0, false
	}
	offset, ok = k.first[id]
	if !ok {
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

// At is the offset of the record of a delivery that stands lowest; it stays in.
func (k *Known) At(id Identity) (offset int64, ok bool) {
	if k.Len() == 0 {
		return 0, false
	}
	offset, ok = k.first[id]
	return offset, ok
}

// Has reports whether a record of the delivery is in it.
func (k *Known) Has(id Identity) bool {
	_, ok := k.At(id)
	return ok
}

// Lowest is the lowest offset in it, or −1 if it is empty. It looks at all of them.
func (k *Known) Lowest() int64 {
	if k.Len() == 0 {
		return -1
	}
	lowest := int64(math.MaxInt64)
	for _, offset := range k.first {
		lowest = min(lowest, offset)
	}
	return lowest
}

// Add records a delivery; the offsets of a delivery come in ascending order.
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
