package envelope

import (
	"bytes"
	"encoding/base64"
	"encoding/hex"
	"math"
	"slices"
	"strconv"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
)

// Style is a way to write documents as JSON. Relaxed has exactly the bytes that the writer of the driver produces, except
// for the old binary subtype 2, where the driver deviates from the specification. There are two reasons for a separate
// writer: the bytes of a record must not change when the driver changes, and the driver takes ten times as long and 250
// allocations for a payload of 800 bytes (BenchmarkAppendDocument). The tests compare the two writers.
type Style uint8

// The styles.
const (
	Relaxed   Style = iota // relaxed Extended JSON on one line
	Plain                  // JSON without types: dates and ids are texts, numbers are numbers
	Debezium               // canonical Extended JSON on several lines, as Debezium's MongoEventRouter writes it
	Connector              // strict JSON, as the MongoDB Kafka connector writes it by default
	Connect                // as Kafka Connect's JsonConverter writes the fields of Debezium's records
)

// AppendValue appends a BSON value as JSON in a style. The error is errBroken if the value is invalid or nested deeper than
// 256, and ErrTooLong before the JSON has taken more than about most bytes.
func AppendValue(dst []byte, bsonType bson.Type, val []byte, style Style, most int) ([]byte, error) {
	writer := newStyleWriter(dst, style, most)
	return writer.finish(writer.writeValue(bsonType, val, 0))
}

// appendDocumentKey appends the key of the document of view, as the MongoDB Kafka connector writes it: {"_id": …}.
func appendDocumentKey(dst []byte, view *View) []byte {
	// The id was bounded when it was read.
	writer := newStyleWriter(dst, Connector, NoLimit)
	writer.open('{')
	writer.writeName([]byte("_id"))

	switch bson.Type(view.IDType) {
	case bson.TypeObjectID:
		writer.writeOID(view.ID)
	case bson.TypeBinary:
		writer.writeBinary(bson.TypeBinaryUUID, view.ID)
	default:
		writer.writeText(view.ID)
	}

	writer.close('}')
	return writer.dst
}

// appendWhole appends the document of view without the fields of the relay.
func appendWhole(dst []byte, view *View, style Style, most int) ([]byte, error) {
	writer := newStyleWriter(dst, style, most)
	return writer.finish(writer.writeElements(view.Raw, 1, view.leavesOut))
}

// styleWriter writes JSON in a style. Its methods append to the text.
type styleWriter struct {
	boundedText
	style Style
	depth int
	empty bool // the innermost object or array has no element yet
}

func newStyleWriter(dst []byte, style Style, most int) *styleWriter {
	return &styleWriter{boundedText: newBoundedText(dst, most), style: style}
}

func (w *styleWriter) open(bracket byte) {
	w.dst = append(w.dst, bracket)
	w.depth++
	w.empty = true
}

func (w *styleWriter) close(bracket byte) {
	w.depth--
	if w.style == Debezium && !w.empty {
		w.startLine()
	}
	w.dst = append(w.dst, bracket)
	w.empty = false
}

func (w *styleWriter) startLine() {
	w.dst = append(w.dst, '\n')
	for range w.depth {
		w.dst = append(w.dst, "  "...)
	}
}

// isJava reports whether the style is that of a library for Java, with white space between the elements.
func (w *styleWriter) isJava() bool { return w.style == Debezium || w.style == Connector }

// startElement writes the comma and the white space before an element of an object or of an array.
func (w *styleWriter) startElement() {
	first := w.empty
	w.empty = false
	if !first {
		w.dst = append(w.dst, ',')
	}
	if w.isJava() {
		w.startSpaced(first)
	}
}

func (w *styleWriter) startSpaced(first bool) {
	switch {
	case w.style == Debezium:
		w.startLine()
	case !first:
		w.dst = append(w.dst, ' ')
	}
}

func (w *styleWriter) writeName(name []byte) {
	w.startElement()
	w.writeText(name)
	if w.isJava() {
		w.dst = append(w.dst, ": "...)
		return
	}
	w.dst = append(w.dst, ':')
}

// writeText writes a string.
func (w *styleWriter) writeText(text []byte) {
	w.writeQuoted(text, escapes(w.isJava()))
}

// openWrapped writes the beginning of {"key": "text"}, before the text. closeWrapped writes the rest.
func (w *styleWriter) openWrapped(key string) {
	w.open('{')
	w.writeName([]byte(key))
	w.dst = append(w.dst, '"')
}

func (w *styleWriter) closeWrapped() {
	w.dst = append(w.dst, '"')
	w.close('}')
}

// writeOne writes {"key": 1} or another constant.
func (w *styleWriter) writeOne(key, constant string) {
	w.open('{')
	w.writeName([]byte(key))
	w.dst = append(w.dst, constant...)
	w.close('}')
}

// writeElements writes a document without the fields that skip selects. A nil skip selects none.
func (w *styleWriter) writeElements(doc []byte, depth int, skip func(name []byte) bool) bool {
	cursor, ok := openDocument(doc)
	if !ok || depth > maxDepth {
		return false
	}

	w.open('{')
	for cursor.next() {
		if skip != nil && skip(cursor.name) {
			continue
		}
		w.writeName(cursor.name)
		if !w.fits(0) || !w.writeValue(cursor.typ, cursor.val, depth) {
			return false
		}
	}
	w.close('}')
	return !cursor.broken
}

func (w *styleWriter) writeArray(arr []byte, depth int) bool {
	cursor, ok := openDocument(arr)
	if !ok || depth > maxDepth {
		return false
	}

	w.open('[')
	for cursor.next() {
		w.startElement()
		if !w.fits(0) || !w.writeValue(cursor.typ, cursor.val, depth) {
			return false
		}
	}
	w.close(']')
	return !cursor.broken
}

// writeValue writes one value. It returns false if the value is invalid.
func (w *styleWriter) writeValue(bsonType bson.Type, val []byte, depth int) bool {
	switch bsonType {
	case bson.TypeEmbeddedDocument:
		return w.writeElements(val, depth+1, nil)
	case bson.TypeArray:
		return w.writeArray(val, depth+1)

	case bson.TypeString:
		w.writeText(StringBytes(val))
	case bson.TypeInt32:
		w.writeInt("$numberInt", int64(int32(uint32LE(val))))
	case bson.TypeInt64:
		w.writeInt("$numberLong", int64(uint64LE(val)))
	case bson.TypeDouble:
		w.writeDouble(math.Float64frombits(uint64LE(val)))
	case bson.TypeBoolean:
		// BSON permits only 0 and 1.
		w.dst = strconv.AppendBool(w.dst, val[0] == 1)
		return val[0] <= 1
	case bson.TypeNull:
		w.dst = append(w.dst, "null"...)

	// JSON has no such types, so the style decides the form.
	case bson.TypeObjectID:
		w.writeOID(val)
	case bson.TypeDateTime:
		w.writeDate(int64(uint64LE(val)))
	case bson.TypeBinary:
		data, subtype, valid := binaryData(val)
		if !valid {
			return false
		}
		w.writeBinary(subtype, data)
	case bson.TypeDecimal128:
		w.writeScalar("$numberDecimal", []byte(bson.NewDecimal128(uint64LE(val[8:]), uint64LE(val)).String()))

	default:
		return w.writeRareType(bsonType, val, depth)
	}
	return true
}

// isTyped reports whether the style preserves the types of BSON.
func (w *styleWriter) isTyped() bool { return w.style != Plain && w.style != Connect }

// writeScalar writes a text: {"key": "text"} with types, and the text alone without.
func (w *styleWriter) writeScalar(key string, text []byte) {
	if !w.isTyped() {
		w.writeText(text)
		return
	}
	w.open('{')
	w.writeName([]byte(key))
	w.writeText(text)
	w.close('}')
}

func (w *styleWriter) writeInt(key string, n int64) {
	// The connector writes the type of a long only.
	if w.style == Debezium || w.style == Connector && key == "$numberLong" {
		w.openWrapped(key)
		w.dst = strconv.AppendInt(w.dst, n, 10)
		w.closeWrapped()
		return
	}
	w.dst = strconv.AppendInt(w.dst, n, 10)
}

func (w *styleWriter) writeDouble(number float64) {
	finite := !math.IsNaN(number) && !math.IsInf(number, 0)

	switch {
	case w.style == Debezium:
		w.openWrapped("$numberDouble")
		w.dst = appendJavaDouble(w.dst, number)
		w.closeWrapped()
	case finite && w.style == Plain || w.style == Relaxed:
		w.dst = appendDouble(w.dst, number)
	case finite || w.style == Connector:
		w.dst = appendJavaDouble(w.dst, number)
	default:
		// JSON has no number for it.
		w.dst = append(appendJavaDouble(append(w.dst, '"'), number), '"')
	}
}

func (w *styleWriter) writeOID(id []byte) {
	var text [24]byte
	w.writeScalar("$oid", hex.AppendEncode(text[:0], id))
}

func (w *styleWriter) writeDate(ms int64) {
	switch w.style {
	case Debezium:
		w.open('{')
		w.writeName([]byte("$date"))
		w.writeInt("$numberLong", ms)
		w.close('}')

	case Connector:
		w.open('{')
		w.writeName([]byte("$date"))
		w.dst = strconv.AppendInt(w.dst, ms, 10)
		w.close('}')

	// Kafka Connect represents a date as milliseconds.
	case Connect:
		w.dst = strconv.AppendInt(w.dst, ms, 10)

	case Relaxed:
		w.dst = appendTime(w.dst, ms)
	case Plain:
		w.dst = time.UnixMilli(ms).UTC().AppendFormat(append(w.dst, '"'), "2006-01-02T15:04:05.999Z07:00")
		w.dst = append(w.dst, '"')
	}
}

func (w *styleWriter) writeBinary(subtype byte, data []byte) {
	switch {
	case w.style == Debezium || w.style == Relaxed:
		w.open('{')
		w.writeName([]byte("$binary"))
		w.writeBinaryFields("base64", "subType", subtype, data)
		w.close('}')

	// The connector writes the older form of Extended JSON.
	case w.style == Connector:
		w.writeBinaryFields("$binary", "$type", subtype, data)

	case w.style == Plain && subtype == bson.TypeBinaryUUID && len(data) == 16:
		var text [36]byte
		w.writeText(AppendText(text[:0], bson.TypeBinary, data))
	default:
		w.writeBase64(data)
	}
}

// writeBinaryFields writes a document of a binary value and its subtype.
func (w *styleWriter) writeBinaryFields(value, kind string, subtype byte, data []byte) {
	w.open('{')
	w.writeName([]byte(value))
	w.writeBase64(data)
	w.writeName([]byte(kind))
	w.dst = append(hex.AppendEncode(append(w.dst, '"'), []byte{subtype}), '"')
	w.close('}')
}

func (w *styleWriter) writeBase64(data []byte) {
	if w.fits(base64.StdEncoding.EncodedLen(len(data))) {
		w.dst = append(base64.StdEncoding.AppendEncode(append(w.dst, '"'), data), '"')
	}
}

// writeRareType is writeValue for types that payloads seldom contain.
func (w *styleWriter) writeRareType(bsonType bson.Type, val []byte, depth int) bool {
	switch bsonType {
	case bson.TypeTimestamp:
		w.writeTimestamp(uint32LE(val[4:]), uint32LE(val))
	case bson.TypeRegex:
		return w.writeRegex(val)
	case bson.TypeJavaScript:
		w.writeScalar("$code", StringBytes(val))
	case bson.TypeCodeWithScope:
		// The cursor has checked only the length of the whole value.
		n := stringLen(val[4:])
		if n < 0 {
			return false
		}
		code := StringBytes(val[4 : 4+n])
		if !w.isTyped() {
			w.writeText(code)
			return true
		}

		w.open('{')
		w.writeName([]byte("$code"))
		w.writeText(code)
		w.writeName([]byte("$scope"))
		ok := w.writeElements(val[4+n:], depth+1, nil)
		w.close('}')
		return ok
	case bson.TypeSymbol:
		w.writeScalar("$symbol", StringBytes(val))
	case bson.TypeDBPointer:
		w.writeDBPointer(val[:len(val)-12], val[len(val)-12:])
	case bson.TypeUndefined, bson.TypeMinKey, bson.TypeMaxKey:
		w.writeConstant(bsonType)
	default:
		return false
	}
	return true
}

func (w *styleWriter) writeDBPointer(ns, id []byte) {
	if !w.isTyped() {
		w.writeOID(id)
		return
	}

	// The specification has a document around the pointer, which the other writers leave out.
	if w.style == Relaxed {
		w.open('{')
		w.writeName([]byte("$dbPointer"))
		defer w.close('}')
	}
	w.open('{')
	w.writeName([]byte("$ref"))
	w.writeText(StringBytes(ns))
	w.writeName([]byte("$id"))
	w.writeOID(id)
	w.close('}')
}

// writeConstant writes a type that has one value.
func (w *styleWriter) writeConstant(bsonType bson.Type) {
	switch {
	case !w.isTyped():
		w.dst = append(w.dst, "null"...)
	case bsonType == bson.TypeUndefined:
		w.writeOne("$undefined", "true")
	case bsonType == bson.TypeMinKey:
		w.writeOne("$minKey", "1")
	default:
		w.writeOne("$maxKey", "1")
	}
}

func (w *styleWriter) writeTimestamp(seconds, increment uint32) {
	// Without types, readers expect a time, so the increment is left out.
	if !w.isTyped() {
		w.writeDate(int64(seconds) * 1000)
		return
	}

	w.open('{')
	w.writeName([]byte("$timestamp"))
	w.open('{')
	w.writeName([]byte("t"))
	w.dst = strconv.AppendUint(w.dst, uint64(seconds), 10)
	w.writeName([]byte("i"))
	w.dst = strconv.AppendUint(w.dst, uint64(increment), 10)
	w.close('}')
	w.close('}')
}

func (w *styleWriter) writeRegex(val []byte) bool {
	// Before the copies.
	if !w.fits(len(val)) {
		return false
	}
	end := bytes.IndexByte(val, 0)
	pattern, options := val[:end], []rune(string(val[end+1:len(val)-1]))
	slices.Sort(options)
	if !w.isTyped() {
		w.writeText([]byte("/" + string(pattern) + "/" + string(options)))
		return true
	}

	// The connector writes the older form, in one document.
	names := [2]string{"$regex", "$options"}
	w.open('{')
	if w.style != Connector {
		w.writeName([]byte("$regularExpression"))
		w.open('{')
		names = [2]string{"pattern", "options"}
	}
	w.writeName([]byte(names[0]))
	w.writeText(pattern)
	w.writeName([]byte(names[1]))
	w.writeText([]byte(string(options)))
	if w.style != Connector {
		w.close('}')
	}
	w.close('}')
	return true
}
