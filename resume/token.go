package resume

import (
	"bytes"
	"encoding/hex"
	"fmt"
	"slices"

	"go.mongodb.org/mongo-driver/v2/bson"
)

// Token is a change stream's resume token: the whole BSON document as the server sent it (`{_data: "82…"}`), owned by
// whoever holds it. The zero value is no token.
//
// As a field in BSON it is stored as the document that it is, and as null when it is zero, so that it goes back to the
// server unchanged. The options of the driver's change stream take it as bson.Raw(t).
type Token []byte

// TokenOf makes the token whose `_data` is data, as printed by Data. It does not check data: the server will.
func TokenOf(data string) Token {
	raw, err := bson.Marshal(bson.D{{Key: "_data", Value: data}})
	if err != nil {
		return nil // a string always marshals
	}
	return Token(raw)
}

// IsZero reports whether there is no token.
func (t Token) IsZero() bool { return len(t) == 0 }

// Clone copies the token, for one that aliases a reply of the server.
func (t Token) Clone() Token { return slices.Clone(t) }

// Equal reports whether both tokens are the same bytes.
func (t Token) Equal(u Token) bool { return bytes.Equal(t, u) }

// Data is the token's `_data`: a KeyString in hexadecimal whose byte order is the order of the stream within one
// deployment. It is "" for a zero token and for a document without such a string.
func (t Token) Data() string {
	if t.IsZero() {
		return ""
	}
	v, err := bson.Raw(t).LookupErr("_data")
	if err != nil {
		return ""
	}
	s, _ := v.StringValueOK()
	return s
}

// timestampType opens a KeyString whose first value is a timestamp.
const timestampType = 0x82

// ClusterTime decodes the time of the position from the first nine bytes of `_data`. It is false when `_data` does not
// begin with a timestamp or the timestamp is zero. It is meant for ages and for display: whether the server still holds
// the history of a token is the server's to say.
func (t Token) ClusterTime() (bson.Timestamp, bool) {
	data := t.Data()
	if len(data) < 18 {
		return bson.Timestamp{}, false
	}
	var b [9]byte
	if _, err := hex.Decode(b[:], []byte(data[:18])); err != nil || b[0] != timestampType {
		return bson.Timestamp{}, false
	}
	ts := bson.Timestamp{
		T: uint32(b[1])<<24 | uint32(b[2])<<16 | uint32(b[3])<<8 | uint32(b[4]),
		I: uint32(b[5])<<24 | uint32(b[6])<<16 | uint32(b[7])<<8 | uint32(b[8]),
	}
	if ts.T == 0 {
		return bson.Timestamp{}, false
	}
	return ts, true
}

// String is Data: a token holds no payload and may be logged.
func (t Token) String() string { return t.Data() }

// MarshalBSONValue stores the token as the document that it is; a zero token is null.
func (t Token) MarshalBSONValue() (byte, []byte, error) {
	if t.IsZero() {
		return byte(bson.TypeNull), nil, nil
	}
	if err := bson.Raw(t).Validate(); err != nil {
		return 0, nil, fmt.Errorf("resume token: %w", err)
	}
	return byte(bson.TypeEmbeddedDocument), t, nil
}

// UnmarshalBSONValue takes a copy of a document, or null for no token.
func (t *Token) UnmarshalBSONValue(typ byte, data []byte) error {
	switch bson.Type(typ) {
	case bson.TypeNull, bson.TypeUndefined:
		*t = nil
		return nil
	case bson.TypeEmbeddedDocument:
		*t = Token(slices.Clone(data))
		return nil
	default:
		return fmt.Errorf("resume token: a document is wanted, found %s", bson.Type(typ))
	}
}
