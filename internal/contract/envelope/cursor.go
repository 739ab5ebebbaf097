package envelope

import (
	"bytes"
	"encoding/binary"

	"go.mongodb.org/mongo-driver/v2/bson"
)

// cursor iterates over the elements of one BSON document without allocating. The iterator of the
// driver is in a package without a promise of stability, and takes twice as long.
type cursor struct {
	rest   []byte // the elements that were not read yet, without the final zero
	typ    bson.Type
	name   []byte
	val    []byte // the bytes of the value, including a length prefix
	broken bool   // an element is invalid
}

// openDocument returns a cursor before the first element of doc. It returns false if the length or
// the final zero is wrong.
func openDocument(doc []byte) (cursor, bool) {
	elements, ok := Elements(doc)
	return cursor{rest: elements}, ok
}

// Elements returns the elements of a BSON document: the bytes between its length and its final zero. It
// returns false if one of these is wrong.
func Elements(doc []byte) (elements []byte, ok bool) {
	if len(doc) < 5 || uint64(binary.LittleEndian.Uint32(doc)) != uint64(len(doc)) || doc[len(doc)-1] != 0 {
		return nil, false
	}
	return doc[4 : len(doc)-1], true
}

// next reads one element. It returns false at the end, and at an invalid element, which it marks in
// c.broken.
func (c *cursor) next() bool {
	if len(c.rest) == 0 {
		return false
	}

	var ok bool
	c.typ, c.name, c.val, c.rest, ok = SplitElement(c.rest)
	c.broken = !ok
	return ok
}

// SplitElement splits the first element off data, which must not be empty. It returns false if that element
// is invalid. It allocates nothing.
func SplitElement(data []byte) (typ bson.Type, name, val, rest []byte, ok bool) {
	typ = bson.Type(data[0])
	// Names are short, so a loop is faster than a call.
	end := 1
	for end < len(data) && data[end] != 0 {
		end++
	}
	if end >= len(data) {
		return 0, nil, nil, nil, false
	}

	// The length comes from the document, so it may be wrong.
	body := data[end+1:]
	n := valueLen(typ, body)
	if n < 0 || n > len(body) {
		return 0, nil, nil, nil, false
	}
	// The capacity of val ends with the value, so an append to it cannot overwrite the next element.
	return typ, data[1:end], body[:n:n], body[n:], true
}

// valueLen returns the number of bytes of a value of type bsonType at the start of data, or −1 if data cannot
// contain one.
func valueLen(bsonType bson.Type, data []byte) int {
	switch bsonType {
	case bson.TypeNull, bson.TypeUndefined, bson.TypeMinKey, bson.TypeMaxKey:
		return 0
	case bson.TypeBoolean:
		return 1
	case bson.TypeInt32:
		return 4
	case bson.TypeDouble, bson.TypeDateTime, bson.TypeTimestamp, bson.TypeInt64:
		return 8
	case bson.TypeObjectID:
		return 12
	case bson.TypeDecimal128:
		return 16
	case bson.TypeString, bson.TypeSymbol, bson.TypeJavaScript:
		return stringLen(data)
	case bson.TypeEmbeddedDocument, bson.TypeArray:
		// The shortest document consists of its length and the final zero.
		return framedLen(data, 0, 5)
	case bson.TypeBinary:
		// The subtype stands between the length and the data.
		return framedLen(data, 5, 5)
	case bson.TypeCodeWithScope:
		// The least parts are the length, a code of 5 bytes, and a scope of 5 bytes.
		return framedLen(data, 0, 14)
	case bson.TypeDBPointer:
		if n := stringLen(data); n >= 0 {
			// An ObjectId follows the name of the collection.
			return n + 12
		}
	case bson.TypeRegex:
		if i := bytes.IndexByte(data, 0); i >= 0 {
			if j := bytes.IndexByte(data[i+1:], 0); j >= 0 {
				return i + j + 2
			}
		}
	}

	return -1
}

// stringLen returns the length of a string value with its prefix and its final zero, or −1 if it is
// invalid.
func stringLen(data []byte) int {
	if len(data) < 5 {
		return -1
	}

	n := int64(int32(binary.LittleEndian.Uint32(data)))
	if n < 1 || n > int64(len(data)-4) || data[3+n] != 0 {
		return -1
	}
	return int(4 + n)
}

// framedLen returns the length of a value that begins with its size, or −1 if it is invalid. extra
// is the number of bytes that the size does not include, and least is the smallest possible length.
func framedLen(data []byte, extra, least int64) int {
	if len(data) < 4 {
		return -1
	}

	n := int64(int32(binary.LittleEndian.Uint32(data))) + extra
	if n < least || n > int64(len(data)) {
		return -1
	}
	return int(n)
}

// StringBytes returns the text of a string value. It aliases val.
func StringBytes(val []byte) []byte { return val[4 : len(val)-1 : len(val)-1] }

// binaryData returns the data and the subtype of a binary value. ok is false if the inner length,
// which the old subtype 2 has, is wrong.
func binaryData(val []byte) (data []byte, subtype byte, ok bool) {
	subtype, data = val[4], val[5:len(val):len(val)]
	if subtype != bson.TypeBinaryBinaryOld {
		return data, subtype, true
	}

	if len(data) < 4 || uint64(binary.LittleEndian.Uint32(data)) != uint64(len(data)-4) {
		return nil, subtype, false
	}
	return data[4:], subtype, true
}
