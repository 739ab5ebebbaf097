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
// toString. The text of bytes is their address in Java; here it is base64. The errors are those of AppendValue.
func appendJavaText(dst []byte, bsonType bson.Type, val []byte, most int) ([]byte, error) {
	writer := javaWriter{newBoundedText(dst, most)}
	return writer.finish(writer.writeValue(bsonType, val, 0))
}

// javaWriter writes values as Java's toString does. Its methods append to the text, and return false if the value is invalid,
// nested too deep or too long.
type javaWriter struct{ boundedText }

func (w *javaWriter) writeValue(bsonType bson.Type, val []byte, depth int) bool {
	// Documents are checked element by element, because their text may be shorter than they are.
	isDocument := bsonType == bson.TypeArray || bsonType == bson.TypeEmbeddedDocument
	if !isDocument && !w.fits(len(val)) {
		return false
	}

	switch bsonType {
	case bson.TypeString, bson.TypeSymbol, bson.TypeJavaScript:
		w.dst = append(w.dst, StringBytes(val)...)
	case bson.TypeInt32, bson.TypeInt64, bson.TypeObjectID:
		w.dst = AppendText(w.dst, bsonType, val)
	case bson.TypeDouble:
		w.dst = appendJavaDouble(w.dst, math.Float64frombits(uint64LE(val)))
	case bson.TypeBoolean:
		w.dst = strconv.AppendBool(w.dst, val[0] == 1)
		return val[0] <= 1
	case bson.TypeDecimal128:
		w.dst = append(w.dst, bson.NewDecimal128(uint64LE(val[8:]), uint64LE(val)).String()...)

	case bson.TypeDateTime:
		w.dst = time.UnixMilli(int64(uint64LE(val))).UTC().AppendFormat(w.dst, javaDate)
	case bson.TypeTimestamp:
		w.dst = time.Unix(int64(uint32LE(val[4:])), 0).UTC().AppendFormat(w.dst, javaDate)
	case bson.TypeBinary:
		data, _, valid := binaryData(val)
		if !w.fits(base64.StdEncoding.EncodedLen(len(data))) {
			return false
		}
		w.dst = base64.StdEncoding.AppendEncode(w.dst, data)
		return valid

	case bson.TypeArray:
		return w.writeList(val, depth+1)
	case bson.TypeEmbeddedDocument:
		return w.writeStruct(val, depth+1)
	case bson.TypeRegex:
		pattern, options, _ := bytes.Cut(val[:len(val)-1], []byte{0})
		w.dst = append(append(w.dst, "Struct{regex="...), pattern...)
		w.dst = append(append(append(w.dst, ",options="...), options...), '}')
	case bson.TypeDBPointer:
		ns, id := val[:len(val)-12], val[len(val)-12:]
		w.dst = append(append(w.dst, "Struct{$ref="...), StringBytes(ns)...)
		w.dst = append(hex.AppendEncode(append(w.dst, ",$id="...), id), '}')
	default:
		// Debezium rejects or leaves out the other types.
		w.dst = append(w.dst, "null"...)
	}
	return true
}

// writeList writes the values of an array: [1, x].
func (w *javaWriter) writeList(arr []byte, depth int) bool {
	cursor, ok := openDocument(arr)
	if !ok || depth > maxDepth {
		return false
	}

	w.dst = append(w.dst, '[')
	for first := true; cursor.next(); first = false {
		if !first {
			w.dst = append(w.dst, ", "...)
		}
		if !w.fits(0) || !w.writeValue(cursor.typ, cursor.val, depth) {
			return false
		}
	}
	w.dst = append(w.dst, ']')
	return !cursor.broken
}

// writeStruct writes a document without the fields that are null: Struct{a=1,b=x}.
func (w *javaWriter) writeStruct(doc []byte, depth int) bool {
	cursor, ok := openDocument(doc)
	if !ok || depth > maxDepth {
		return false
	}

	w.dst = append(w.dst, "Struct{"...)
	first := true
	for cursor.next() {
		if cursor.typ == bson.TypeNull || cursor.typ == bson.TypeUndefined {
			continue
		}
		if !first {
			w.dst = append(w.dst, ',')
		}
		first = false

		if !w.fits(len(cursor.name)) {
			return false
		}
		w.dst = append(append(w.dst, cursor.name...), '=')
		if !w.writeValue(cursor.typ, cursor.val, depth) {
			return false
		}
	}
	w.dst = append(w.dst, '}')
	return !cursor.broken
}
