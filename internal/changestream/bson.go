package changestream

import (
	"bytes"
	"encoding/binary"
	"errors"
)

// BSON element types that the parser decodes.
const (
	typeString    = 0x02
	typeDocument  = 0x03
	typeBinary    = 0x05
	typeDate      = 0x09
	typeTimestamp = 0x11
)

var errTruncated = errors.New("truncated BSON")

// documentBody returns the elements of a document: the bytes between its length and its final zero.
func documentBody(doc []byte) ([]byte, error) {
	if len(doc) < 5 {
		return nil, errTruncated
	}

	n := int64(binary.LittleEndian.Uint32(doc))
	if n < 5 || n > int64(len(doc)) || doc[n-1] != 0 {
		return nil, errTruncated
	}
	return doc[4 : n-1], nil
}

// splitElement splits the first element off b. b must not be empty.
func splitElement(b []byte) (typ byte, name, val, rest []byte, err error) {
	// Names are short, so a loop is faster than a call of bytes.IndexByte.
	end := 1
	for end < len(b) && b[end] != 0 {
		end++
	}
	if end >= len(b) {
		return 0, nil, nil, nil, errTruncated
	}

	typ, name = b[0], b[1:end]
	v := b[end+1:]
	n, ok := valueLength(typ, v)
	if !ok || n < 0 || n > len(v) {
		return 0, nil, nil, nil, errTruncated
	}
	return typ, name, v[:n:n], v[n:], nil
}

// valueLength returns the length of the value of type typ at the beginning of v.
func valueLength(typ byte, v []byte) (int, bool) {
	switch typ {
	case 0x01, typeDate, typeTimestamp, 0x12: // double, date, timestamp, int64
		return 8, true
	case typeString, 0x0d, 0x0e: // string, code, symbol
		n, ok := readInt32(v)
		return 4 + n, ok && n >= 1
	case typeDocument, 0x04, 0x0f: // document, array, code with scope
		n, ok := readInt32(v)
		return n, ok && n >= 5
	case typeBinary:
		n, ok := readInt32(v)
		return 5 + n, ok && n >= 0
	case 0x06, 0x0a, 0x7f, 0xff: // undefined, null, max key, min key
		return 0, true
	case 0x07: // ObjectId
		return 12, true
	case 0x08: // bool
		return 1, true
	case 0x0b: // regular expression: two C strings
		return regexLength(v)
	case 0x0c: // DBPointer
		n, ok := readInt32(v)
		return 4 + n + 12, ok && n >= 1
	case 0x10: // int32
		return 4, true
	case 0x13: // decimal128
		return 16, true
	}
	return 0, false
}

// regexLength returns the length of the two C strings of a regular expression.
func regexLength(v []byte) (int, bool) {
	pattern := bytes.IndexByte(v, 0)
	if pattern < 0 {
		return 0, false
	}

	flags := bytes.IndexByte(v[pattern+1:], 0)
	return pattern + flags + 2, flags >= 0
}

func readInt32(v []byte) (int, bool) {
	if len(v) < 4 {
		return 0, false
	}
	return int(int32(binary.LittleEndian.Uint32(v))), true
}

// stringValue returns the content of a string value.
func stringValue(v []byte) []byte { return v[4 : len(v)-1] }
