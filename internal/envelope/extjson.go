package envelope

import (
	"bytes"
	"encoding/base64"
	"encoding/hex"
	"math"
	"slices"
	"strconv"
	"time"
	"unicode/utf8"

	"go.mongodb.org/mongo-driver/v2/bson"
)

// This file writes relaxed Extended JSON from BSON, with exactly the bytes that the writer of the
// driver produces. The exception is the old binary subtype 2, where the driver deviates from the
// specification. There are two reasons for a separate writer: the bytes of a record must not change
// when the driver changes, and the driver takes ten times as long and 250 allocations for a payload
// of 800 bytes (BenchmarkAppendDocument). The tests compare the two writers.

// maxDepth limits the nesting of documents, to protect the stack. It is larger than the limit of
// the server.
const maxDepth = 256

// appendDocument appends doc as a JSON object. It returns false if doc is invalid.
func appendDocument(dst, doc []byte, depth int) ([]byte, bool) {
	c, ok := openDocument(doc)
	if !ok || depth > maxDepth {
		return dst, false
	}

	dst = append(dst, '{')
	for first := true; c.next(); first = false {
		if !first {
			dst = append(dst, ',')
		}

		dst = append(appendQuoted(dst, c.name), ':')
		if dst, ok = appendJSON(dst, c.typ, c.val, depth); !ok {
			return dst, false
		}
	}

	return append(dst, '}'), !c.broken
}

// appendArray appends arr as a JSON array. It returns false if arr is invalid.
func appendArray(dst, arr []byte, depth int) ([]byte, bool) {
	return appendList(dst, arr, depth, ",", appendJSON)
}

// appendList appends the values of arr between brackets, each by appendValue. It returns false if arr is invalid.
func appendList(
	dst, arr []byte, depth int, separator string, appendValue func([]byte, bson.Type, []byte, int) ([]byte, bool),
) ([]byte, bool) {
	c, ok := openDocument(arr)
	if !ok || depth > maxDepth {
		return dst, false
	}

	dst = append(dst, '[')
	for first := true; c.next(); first = false {
		if !first {
			dst = append(dst, separator...)
		}
		if dst, ok = appendValue(dst, c.typ, c.val, depth); !ok {
			return dst, false
		}
	}

	return append(dst, ']'), !c.broken
}

// appendJSON appends one value. It returns false if the value is invalid. appendRareType handles
// the types that are seldom used.
func appendJSON(dst []byte, t bson.Type, val []byte, depth int) ([]byte, bool) {
	switch t {
	case bson.TypeString:
		return appendQuoted(dst, StringBytes(val)), true
	case bson.TypeInt32:
		return strconv.AppendInt(dst, int64(int32(uint32LE(val))), 10), true
	case bson.TypeInt64:
		return strconv.AppendInt(dst, int64(uint64LE(val)), 10), true
	case bson.TypeDouble:
		return appendDouble(dst, math.Float64frombits(uint64LE(val))), true
	case bson.TypeBoolean:
		// BSON permits only 0 and 1.
		return strconv.AppendBool(dst, val[0] == 1), val[0] <= 1
	case bson.TypeNull:
		return append(dst, "null"...), true
	case bson.TypeEmbeddedDocument:
		return appendDocument(dst, val, depth+1)
	case bson.TypeArray:
		return appendArray(dst, val, depth+1)
	case bson.TypeObjectID:
		return appendOID(dst, val), true
	case bson.TypeDateTime:
		return appendTime(dst, int64(uint64LE(val))), true
	case bson.TypeBinary:
		data, subtype, ok := binaryData(val)
		if !ok {
			return dst, false
		}

		dst = base64.StdEncoding.AppendEncode(append(dst, `{"$binary":{"base64":"`...), data)
		return append(hex.AppendEncode(append(dst, `","subType":"`...), []byte{subtype}), `"}}`...), true
	default:
		return appendRareType(dst, t, val, depth)
	}
}

// appendRareType is appendJSON for types that payloads seldom contain.
func appendRareType(dst []byte, t bson.Type, val []byte, depth int) ([]byte, bool) {
	switch t {
	case bson.TypeTimestamp:
		dst = strconv.AppendUint(append(dst, `{"$timestamp":{"t":`...), uint64(uint32LE(val[4:])), 10)
		dst = strconv.AppendUint(append(dst, `,"i":`...), uint64(uint32LE(val)), 10)
		return append(dst, "}}"...), true
	case bson.TypeDecimal128:
		dst = append(append(dst, `{"$numberDecimal":"`...), bson.NewDecimal128(uint64LE(val[8:]), uint64LE(val)).String()...)
		return append(dst, `"}`...), true
	case bson.TypeRegex:
		// The specification requires the options in alphabetical order.
		pattern, options, _ := bytes.Cut(val[:len(val)-1], []byte{0})
		sorted := []rune(string(options))
		slices.Sort(sorted)
		dst = appendQuoted(append(dst, `{"$regularExpression":{"pattern":`...), pattern)
		return append(appendQuoted(append(dst, `,"options":`...), []byte(string(sorted))), "}}"...), true
	case bson.TypeJavaScript:
		return append(appendQuoted(append(dst, `{"$code":`...), StringBytes(val)), '}'), true
	case bson.TypeCodeWithScope:
		// The cursor has checked only the length of the whole value.
		n := stringLen(val[4:])
		if n < 0 {
			return dst, false
		}

		dst = appendQuoted(append(dst, `{"$code":`...), StringBytes(val[4:4+n]))
		dst, ok := appendDocument(append(dst, `,"$scope":`...), val[4+n:], depth+1)
		return append(dst, '}'), ok
	case bson.TypeSymbol:
		return append(appendQuoted(append(dst, `{"$symbol":`...), StringBytes(val)), '}'), true
	case bson.TypeDBPointer:
		ns, id := val[:len(val)-12], val[len(val)-12:]
		dst = appendQuoted(append(dst, `{"$dbPointer":{"$ref":`...), StringBytes(ns))
		return append(appendOID(append(dst, `,"$id":`...), id), "}}"...), true
	case bson.TypeUndefined:
		return append(dst, `{"$undefined":true}`...), true
	case bson.TypeMinKey:
		return append(dst, `{"$minKey":1}`...), true
	case bson.TypeMaxKey:
		return append(dst, `{"$maxKey":1}`...), true
	}

	return dst, false
}

func appendOID(dst, id []byte) []byte {
	return append(hex.AppendEncode(append(dst, `{"$oid":"`...), id), `"}`...)
}

// appendTime appends a date in milliseconds since 1970: as a text if every reader can represent it,
// otherwise as a number.
func appendTime(dst []byte, ms int64) []byte {
	t := time.UnixMilli(ms).UTC()
	if t.Year() < 1970 || t.Year() > 9999 {
		return append(strconv.AppendInt(append(dst, `{"$date":{"$numberLong":"`...), ms, 10), `"}}`...)
	}
	return append(t.AppendFormat(append(dst, `{"$date":"`...), "2006-01-02T15:04:05.999Z07:00"), `"}`...)
}

// appendDouble appends a number. A whole number gets one decimal, so that readers treat it as a
// double.
func appendDouble(dst []byte, f float64) []byte {
	switch {
	case math.IsInf(f, 1):
		return append(dst, `{"$numberDouble":"Infinity"}`...)
	case math.IsInf(f, -1):
		return append(dst, `{"$numberDouble":"-Infinity"}`...)
	case math.IsNaN(f):
		return append(dst, `{"$numberDouble":"NaN"}`...)
	}

	// Without a point or an exponent, the number would be read as an integer.
	start := len(dst)
	dst = strconv.AppendFloat(dst, f, 'G', -1, 64)
	if !bytes.ContainsAny(dst[start:], "E.") {
		dst = append(dst, ".0"...)
	}

	return dst
}

// appendQuoted appends s as a JSON string. Bytes that are not UTF-8 become the replacement
// character.
func appendQuoted(dst, s []byte) []byte {
	dst = append(dst, '"')
	// s[start:i] was read, but not appended yet.
	start := 0
	for i := 0; i < len(s); {
		if b := s[i]; b < utf8.RuneSelf {
			if b < ' ' || b == '"' || b == '\\' {
				dst = appendEscape(append(dst, s[start:i]...), b)
				start = i + 1
			}
			i++
			continue
		}

		r, size := utf8.DecodeRune(s[i:])
		switch {
		case r == utf8.RuneError && size == 1:
			dst = append(append(dst, s[start:i]...), `\ufffd`...)
			start = i + size
			// JavaScript treats these two as line ends.
		case r == '\u2028' || r == '\u2029':
			dst = append(append(append(dst, s[start:i]...), `\u202`...), "89"[r-'\u2028'])
			start = i + size
		}

		i += size
	}

	return append(append(dst, s[start:]...), '"')
}

// appendEscape appends the escape sequence of the character b.
func appendEscape(dst []byte, b byte) []byte {
	switch b {
	case '"', '\\':
		return append(dst, '\\', b)
	case '\n':
		return append(dst, `\n`...)
	case '\r':
		return append(dst, `\r`...)
	case '\t':
		return append(dst, `\t`...)
	case '\b':
		return append(dst, `\b`...)
	case '\f':
		return append(dst, `\f`...)
	}

	return hex.AppendEncode(append(dst, `\u00`...), []byte{b})
}
