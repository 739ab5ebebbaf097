package envelope

import (
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/contract/record"
)

// MaxFieldText is the largest text of a field that is a key, or part of a topic or of a header. Without a limit, a document
// of 16 MiB could fill several headers of its record.
const MaxFieldText = 32 << 10

// FieldProblem returns why a template must not refer to a field of the document, or "".
func (m *Mapping) FieldProblem(path string) string {
	name, _, _ := strings.Cut(path, ".")
	switch {
	case name == "" || strings.HasSuffix(path, ".") || strings.Contains(path, ".."):
		return "expected the name of a field, such as tenant or customer.region"
	case slices.Contains(relayWritten, name):
		return "the field " + name + " has a meaning for the relay"
	}
	return ""
}

// Field returns the value at a path of the document, such as customer.region. The type is 0 if there is none.
func (v *View) Field(path string) (bson.Type, []byte) {
	doc := v.Raw
	for {
		name, rest, nested := strings.Cut(path, ".")
		bsonType, val := findField(doc, name)
		if !nested {
			return bsonType, val
		}
		if bsonType != bson.TypeEmbeddedDocument {
			return 0, nil
		}
		doc, path = val, rest
	}
}

// findField returns the first field called name.
func findField(doc []byte, name string) (bson.Type, []byte) {
	cursor, ok := openDocument(doc)
	for ok && cursor.next() {
		if string(cursor.name) == name {
			return cursor.typ, cursor.val
		}
	}
	return 0, nil
}

// Finding is whether a document has a value that can be a part of a topic or of a header.
type Finding uint8

// The findings.
const (
	Found   Finding = iota
	Missing         // or null
	Unfit           // its type has no text
	TooLong         // longer than MaxFieldText
)

// Class returns the class of an envelope whose value was not found.
func (f Finding) Class() record.Class {
	if f == TooLong {
		return record.MessageTooLarge
	}
	return record.Malformed
}

// AppendField appends the text of the value at a path of the document, if it is found.
func (v *View) AppendField(dst []byte, path string) ([]byte, Finding) {
	bsonType, val := v.Field(path)
	switch bsonType {
	case 0, bson.TypeNull, bson.TypeUndefined:
		return dst, Missing
	case bson.TypeString:
		if len(StringBytes(val)) > MaxFieldText {
			return dst, TooLong
		}
		dst = append(dst, StringBytes(val)...)
	case bson.TypeInt32, bson.TypeInt64, bson.TypeObjectID:
		dst = AppendText(dst, bsonType, val)
	case bson.TypeBoolean:
		dst = strconv.AppendBool(dst, val[0] == 1)
	case bson.TypeDouble:
		number := math.Float64frombits(uint64LE(val))
		if n, ok := wholeNumber(number); ok {
			return strconv.AppendInt(dst, n, 10), Found
		}
		dst = appendDouble(dst, number)
	case bson.TypeDateTime:
		dst = time.UnixMilli(int64(uint64LE(val))).UTC().AppendFormat(dst, "2006-01-02T15:04:05.000Z07:00")
	case bson.TypeDecimal128:
		dst = append(dst, bson.NewDecimal128(uint64LE(val[8:]), uint64LE(val)).String()...)
	case bson.TypeBinary:
		data, subtype, ok := binaryData(val)
		if !ok || subtype != bson.TypeBinaryUUID || len(data) != 16 {
			return dst, Unfit
		}
		dst = AppendText(dst, bsonType, data)
	default:
		return dst, Unfit
	}
	return dst, Found
}

// DescribeField returns why the value at a path of the document was not found.
func (v *View) DescribeField(path string, finding Finding) string {
	bsonType, val := v.Field(path)
	switch finding {
	case Unfit:
		return "field " + path + " is " + typeName(bsonType) + "; a text, a number, a date or an id is wanted"
	case TooLong:
		return fmt.Sprintf("field %s has %d bytes; at most %d are allowed", path, len(val), MaxFieldText)
	case Found, Missing:
	}
	return "field " + path + " is missing"
}

// AppendHeader appends the value of the first header of the envelope called name, if it is found.
func (v *View) AppendHeader(dst []byte, name string) ([]byte, Finding) {
	for it := v.Headers.Iter(); it.Next(); {
		if string(it.Key) != name || it.Value == nil {
			continue
		}
		if len(it.Value) > MaxFieldText {
			return dst, TooLong
		}
		return append(dst, it.Value...), Found
	}
	return dst, Missing
}

// AppendQuoted appends text as a JSON string. Bytes that are not UTF-8 become the replacement character. It returns ErrTooLong
// before it has appended more than about most bytes.
func AppendQuoted(dst, text []byte, most int) ([]byte, error) {
	boundedText := newBoundedText(dst, most)
	boundedText.writeQuoted(text, usualEscapes)
	return boundedText.finish(true)
}
