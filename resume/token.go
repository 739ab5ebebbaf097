package resume

import (
	"bytes"
	"encoding/hex"
	"fmt"
	"slices"
	"strings"

	"go.mongodb.org/mongo-driver/v2/bson"
)

// Token is the resume token of a change stream: the whole BSON document that the server sent
// (`{_data: "82…"}`). The zero value is no token.
//
// In BSON a Token is stored as its document, or as null if it is zero. So it can be sent to the
// server unchanged. For the options of the driver's change stream, use bson.Raw(t).
type Token []byte

// TokenOf returns the token with this `_data`, which is the text of Data. It does not check the
// text: the server does.
func TokenOf(data string) Token {
	raw, err := bson.Marshal(bson.D{{Key: "_data", Value: data}})
	if err != nil {
		// Marshal cannot fail for a string.
		return nil
	}
	return Token(raw)
}

// IsZero reports whether t is no token.
func (t Token) IsZero() bool { return len(t) == 0 }

// Clone returns a copy of the token. It is needed if the token aliases a response of the server.
func (t Token) Clone() Token { return slices.Clone(t) }

// Equal reports whether both tokens have the same bytes.
func (t Token) Equal(token Token) bool { return bytes.Equal(t, token) }

// Data returns the `_data` of the token: a hexadecimal KeyString, whose order is the order of the
// stream within one deployment. It returns "" for a zero token and for a document without `_data`.
func (t Token) Data() string {
	if t.IsZero() {
		return ""
	}

	value, err := bson.Raw(t).LookupErr("_data")
	if err != nil {
		return ""
	}

	text, _ := value.StringValueOK()
	return text
}

// versionEnd is where the version ends in the data of a token: after the timestamp, in two bytes.
const versionEnd = 18 + 4

// compareData orders two positions of one deployment by the data of their tokens, as strings.Compare. MongoDB 7.0 writes another version
// of tokens than 6.0. Tokens of two versions are equal if their operations are: after the operation they describe it in different ways.
func compareData(a, b string) int {
	if len(a) < versionEnd || len(b) < versionEnd || a[18:versionEnd] == b[18:versionEnd] {
		return strings.Compare(a, b)
	}
	return bytes.Compare(AppendOperation(nil, a), AppendOperation(nil, b))
}

// AppendOperation appends the part of the data of a token that all versions of MongoDB write alike: the time, the kind of the token, and
// the number of the operation in its transaction. With namespace and id it identifies an event, and its order is that of the data.
func AppendOperation[T ~string | ~[]byte](dst []byte, data T) []byte {
	if len(data) < versionEnd {
		return append(dst, data...)
	}
	end := skipNumber(data, skipNumber(data, versionEnd))
	return append(append(dst, data[:18]...), data[versionEnd:end]...)
}

// skipNumber returns where a number of a KeyString ends that begins at start. The first byte is its size: 0x29 for zero, 0x2B for a
// number of one byte, 0x2C for two, …
func skipNumber[T ~string | ~[]byte](data T, start int) int {
	const zero, oneByte, eightBytes = 0x29, 0x2b, 0x32
	if start+2 > len(data) {
		return len(data)
	}
	var size [1]byte
	if _, err := hex.Decode(size[:], []byte{data[start], data[start+1]}); err != nil || size[0] != zero && (size[0] < oneByte || size[0] > eightBytes) {
		return len(data)
	}
	n := 0
	if size[0] != zero {
		n = int(size[0]) - oneByte + 1
	}
	return min(start+2+2*n, len(data))
}

// timestampType is the first byte of a KeyString that begins with a timestamp.
const timestampType = 0x82

// ClusterTime returns the time of the position, which it decodes from the first nine bytes of
// `_data`. ok is false if they are not a timestamp or if the timestamp is zero. Use the time to
// display a position or its age. It does not show whether the server still has the history.
func (t Token) ClusterTime() (ts bson.Timestamp, ok bool) {
	data := t.Data()
	if len(data) < 18 {
		return bson.Timestamp{}, false
	}

	var head [9]byte
	if _, err := hex.Decode(head[:], []byte(data[:18])); err != nil || head[0] != timestampType {
		return bson.Timestamp{}, false
	}

	ts = bson.Timestamp{
		T: uint32(head[1])<<24 | uint32(head[2])<<16 | uint32(head[3])<<8 | uint32(head[4]),
		I: uint32(head[5])<<24 | uint32(head[6])<<16 | uint32(head[7])<<8 | uint32(head[8]),
	}
	if ts.T == 0 {
		return bson.Timestamp{}, false
	}

	return ts, true
}

// String returns Data. A token contains no payload and may be logged.
func (t Token) String() string { return t.Data() }

// MarshalBSONValue encodes the token as its document, or as null if it is zero. It fails if the
// document is invalid.
func (t Token) MarshalBSONValue() (byte, []byte, error) {
	if t.IsZero() {
		return byte(bson.TypeNull), nil, nil
	}
	if err := bson.Raw(t).Validate(); err != nil {
		return 0, nil, fmt.Errorf("resume token: %w", err)
	}
	return byte(bson.TypeEmbeddedDocument), t, nil
}

// UnmarshalBSONValue decodes a document, which it copies, or null. It fails for other types.
func (t *Token) UnmarshalBSONValue(typ byte, data []byte) error {
	switch bson.Type(typ) {
	case bson.TypeNull, bson.TypeUndefined:
		*t = nil
		return nil
	case bson.TypeEmbeddedDocument:
		*t = Token(slices.Clone(data))
		return nil
	default:
		return fmt.Errorf("resume token: invalid BSON type %s, want a document", bson.Type(typ))
	}
}
