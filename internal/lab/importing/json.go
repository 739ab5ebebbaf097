package importing

import (
	"encoding/base64"
	"encoding/json"
	"fmt"
	"math"
	"slices"
	"strconv"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
)

// maxJSONDepth bounds the nesting of a payload, as the server does.
const maxJSONDepth = 180

// appendJSON appends value as JSON.stringify returns it for a document that the driver for Node has read with its default options.
func appendJSON(dst []byte, value bson.RawValue, depth int) ([]byte, error) {
	if depth > maxJSONDepth {
		return nil, fmt.Errorf("the payload has more than %d levels", maxJSONDepth)
	}

	switch value.Type {
	case bson.TypeNull, bson.TypeUndefined:
		return append(dst, "null"...), nil
	case bson.TypeBoolean:
		return strconv.AppendBool(dst, value.Boolean()), nil
	case bson.TypeInt32:
		return strconv.AppendInt(dst, int64(value.Int32()), 10), nil
	case bson.TypeInt64:
		// JavaScript has only doubles, so the publisher would have sent another number.
		if n := value.Int64(); n >= -1<<53 && n <= 1<<53 {
			return strconv.AppendInt(dst, n, 10), nil
		}
		return nil, fmt.Errorf("the payload has the number %d, which JavaScript does not store exactly", value.Int64())
	case bson.TypeDouble:
		return appendNumber(dst, value.Double())
	case bson.TypeString:
		return appendText(dst, value.StringValue()), nil
	case bson.TypeObjectID:
		return appendText(dst, value.ObjectID().Hex()), nil
	case bson.TypeDateTime:
		return appendText(dst, isoTime(value.Time())), nil
	case bson.TypeBinary:
		if subtype, data := value.Binary(); subtype == bson.TypeBinaryGeneric {
			return appendText(dst, base64.StdEncoding.EncodeToString(data)), nil
		}
	case bson.TypeEmbeddedDocument:
		return appendObject(dst, value.Document(), depth)
	case bson.TypeArray:
		return appendArray(dst, value.Array(), depth)
	default:
	}

	return nil, fmt.Errorf("the payload has a value of type %s, which has no JSON", value.Type)
}

// isoTime formats a time as Date.toISOString does.
func isoTime(moment time.Time) string { return moment.UTC().Format("2006-01-02T15:04:05.000Z") }

func appendObject(dst []byte, doc bson.Raw, depth int) ([]byte, error) {
	elems, err := doc.Elements()
	if err != nil {
		return nil, err
	}
	// JavaScript lists names that are array indexes first, in numerical order.
	index := func(element bson.RawElement) (uint64, bool) {
		n, err := strconv.ParseUint(element.Key(), 10, 32)
		return n, err == nil && n < math.MaxUint32 && strconv.FormatUint(n, 10) == element.Key()
	}
	slices.SortStableFunc(elems, func(a, b bson.RawElement) int {
		position, isA := index(a)
		n, isB := index(b)
		switch {
		case isA && isB:
			return int(int64(position) - int64(n))
		case isA:
			return -1
		case isB:
			return 1
		}
		return 0
	})

	dst = append(dst, '{')
	for i, e := range elems {
		if i > 0 {
			dst = append(dst, ',')
		}
		dst = append(appendText(dst, e.Key()), ':')
		if dst, err = appendJSON(dst, e.Value(), depth+1); err != nil {
			return nil, err
		}
	}
	return append(dst, '}'), nil
}

func appendArray(dst []byte, array bson.RawArray, depth int) ([]byte, error) {
	values, err := array.Values()
	if err != nil {
		return nil, err
	}

	dst = append(dst, '[')
	for i, v := range values {
		if i > 0 {
			dst = append(dst, ',')
		}
		if dst, err = appendJSON(dst, v, depth+1); err != nil {
			return nil, err
		}
	}
	return append(dst, ']'), nil
}

// appendNumber appends a number in the format of JavaScript, which encoding/json uses as well.
func appendNumber(dst []byte, number float64) ([]byte, error) {
	// JSON.stringify writes null for these.
	if math.IsNaN(number) || math.IsInf(number, 0) {
		return append(dst, "null"...), nil
	}
	// JSON.stringify(-0) is 0.
	if number == 0 {
		return append(dst, '0'), nil
	}
	text, err := json.Marshal(number)
	return append(dst, text...), err
}

// appendText appends a text in the format of JSON.stringify, which escapes less than encoding/json.
func appendText(dst []byte, text string) []byte {
	const hexDigits = "0123456789abcdef"
	dst = append(dst, '"')

	for _, r := range text {
		switch {
		case r == '"' || r == '\\':
			dst = append(dst, '\\', byte(r))
		case r == '\b':
			dst = append(dst, `\b`...)
		case r == '\f':
			dst = append(dst, `\f`...)
		case r == '\n':
			dst = append(dst, `\n`...)
		case r == '\r':
			dst = append(dst, `\r`...)
		case r == '\t':
			dst = append(dst, `\t`...)
		case r < ' ':
			dst = append(dst, '\\', 'u', '0', '0', hexDigits[r>>4], hexDigits[r&15])
		default:
			dst = append(dst, string(r)...)
		}
	}

	return append(dst, '"')
}
