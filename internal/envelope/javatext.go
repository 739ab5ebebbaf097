package envelope

import (
	"bytes"
	"encoding/base64"
	"encoding/hex"
	"math"
	"strconv"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
)

// javaDate is the format of Java's Date.toString, whose time zone is that of the process. Debezium's image has UTC.
const javaDate = "Mon Jan 02 15:04:05 MST 2006"

// appendJavaText appends the text that Kafka Connect's StringConverter makes of a value of Debezium's: that of Java's
// toString. The text of bytes is their address in Java; here it is base64. It returns false if the value is invalid or nested
// too deep.
func appendJavaText(dst []byte, t bson.Type, val []byte, depth int) (_ []byte, ok bool) {
	switch t {
	case bson.TypeString, bson.TypeSymbol, bson.TypeJavaScript:
		return append(dst, StringBytes(val)...), true
	case bson.TypeInt32, bson.TypeInt64, bson.TypeObjectID:
		return AppendText(dst, t, val), true
	case bson.TypeDouble:
		return appendJavaDouble(dst, math.Float64frombits(uint64LE(val))), true
	case bson.TypeBoolean:
		return strconv.AppendBool(dst, val[0] == 1), val[0] <= 1
	case bson.TypeDecimal128:
		return append(dst, bson.NewDecimal128(uint64LE(val[8:]), uint64LE(val)).String()...), true

	case bson.TypeDateTime:
		return time.UnixMilli(int64(uint64LE(val))).UTC().AppendFormat(dst, javaDate), true
	case bson.TypeTimestamp:
		return time.Unix(int64(uint32LE(val[4:])), 0).UTC().AppendFormat(dst, javaDate), true
	case bson.TypeBinary:
		data, _, valid := binaryData(val)
		return base64.StdEncoding.AppendEncode(dst, data), valid

	case bson.TypeArray:
		return appendJavaList(dst, val, depth+1)
	case bson.TypeEmbeddedDocument:
		return appendJavaStruct(dst, val, depth+1)
	case bson.TypeRegex:
		pattern, options, _ := bytes.Cut(val[:len(val)-1], []byte{0})
		dst = append(append(dst, "Struct{regex="...), pattern...)
		return append(append(append(dst, ",options="...), options...), '}'), true
	case bson.TypeDBPointer:
		ns, id := val[:len(val)-12], val[len(val)-12:]
		dst = append(append(dst, "Struct{$ref="...), StringBytes(ns)...)
		return append(hex.AppendEncode(append(dst, ",$id="...), id), '}'), true
	}
	// Debezium rejects or leaves out the other types.
	return append(dst, "null"...), true
}

// appendJavaList appends the values of an array: [1, x].
func appendJavaList(dst, arr []byte, depth int) (_ []byte, ok bool) {
	c, ok := openDocument(arr)
	if !ok || depth > maxDepth {
		return dst, false
	}

	dst = append(dst, '[')
	for first := true; c.next(); first = false {
		if !first {
			dst = append(dst, ", "...)
		}
		if dst, ok = appendJavaText(dst, c.typ, c.val, depth); !ok {
			return dst, false
		}
	}
	return append(dst, ']'), !c.broken
}

// appendJavaStruct appends a document without the fields that are null: Struct{a=1,b=x}.
func appendJavaStruct(dst, doc []byte, depth int) (_ []byte, ok bool) {
	c, ok := openDocument(doc)
	if !ok || depth > maxDepth {
		return dst, false
	}

	dst = append(dst, "Struct{"...)
	first := true
	for c.next() {
		if c.typ == bson.TypeNull || c.typ == bson.TypeUndefined {
			continue
		}
		if !first {
			dst = append(dst, ',')
		}
		first = false
		dst = append(append(dst, c.name...), '=')
		if dst, ok = appendJavaText(dst, c.typ, c.val, depth); !ok {
			return dst, false
		}
	}
	return append(dst, '}'), !c.broken
}
