// Package eventid is the id of an event, as services, stored documents and operators give it. It is a value; nothing calls a server.
package eventid

import (
	"encoding/binary"
	"errors"
	"fmt"
	"reflect"

	"github.com/google/uuid"
	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/contract/envelope"
)

// ID is the id of an event: a UUID, an ObjectId or a string. IDs can be compared with ==. The zero
// value is no id, and with WithID it means the default.
type ID struct {
	typ bson.Type
	val string // 16 bytes, 12 bytes, or the text
}

// New returns id as an ID. id is a UUID, which is any array of 16 bytes, an ObjectId, which is any
// array of 12 bytes, or a string.
func New[T ~[16]byte | ~[12]byte | ~string](id T) ID { return Of(id) }

// Of is New for a value of a type that the compiler has checked already. It panics for other types.
func Of(id any) ID {
	val := reflect.ValueOf(id)
	if val.Kind() == reflect.String {
		return ID{bson.TypeString, val.String()}
	}

	raw := make([]byte, val.Len())
	reflect.Copy(reflect.ValueOf(raw), val)
	// Only the length distinguishes an ObjectId from a UUID.
	if len(raw) == len(bson.ObjectID{}) {
		return ID{bson.TypeObjectID, string(raw)}
	}
	return ID{bson.TypeBinary, string(raw)}
}

// Parse parses the text of an id that a user has typed, or that a record has. The 36 characters of a UUID and the base64 of
// its bytes give a UUID, 24 hexadecimal digits give an ObjectId, and any other text gives a string id. For a string id
// that looks like one of the others, use New.
func Parse(text string) ID {
	if id, ok := envelope.UUIDOfBase64([]byte(text)); ok {
		return New(id)
	}
	if envelope.LooksBinary([]byte(text)) {
		if len(text) == 24 {
			if id, err := bson.ObjectIDFromHex(text); err == nil {
				return New(id)
			}
		} else if id, err := uuid.Parse(text); err == nil {
			return New(id)
		}
	}

	return New(text)
}

// IsZero reports whether id is the zero value, which is no id.
func (id ID) IsZero() bool { return id.typ == 0 }

// String returns the canonical text of the id, which is also the header `id` of the record.
func (id ID) String() string { return string(envelope.AppendText(nil, id.typ, []byte(id.val))) }

// MarshalBSONValue encodes the id as a binary, an ObjectId or a string. It fails for the zero
// value.
func (id ID) MarshalBSONValue() (byte, []byte, error) {
	if id.IsZero() {
		return 0, nil, errors.New("event id: zero")
	}
	return byte(id.typ), AppendValue(nil, id), nil
}

// UnmarshalBSONValue decodes an id of any of the three types. It fails for other types and for
// invalid values.
func (id *ID) UnmarshalBSONValue(typ byte, data []byte) error {
	val, err := envelope.ParseID(bson.Type(typ), data)
	if err != nil {
		return fmt.Errorf("event id: %w", err)
	}

	*id = ID{bson.Type(typ), string(val)}
	return nil
}

// MarshalText returns the canonical text, so that the id is a string in JSON and in logs. The zero value is the empty text.
func (id ID) MarshalText() ([]byte, error) {
	return envelope.AppendText(nil, id.typ, []byte(id.val)), nil
}

// UnmarshalText parses the id as Parse does. The empty text is the zero value.
func (id *ID) UnmarshalText(text []byte) error {
	*id = ID{}
	if len(text) > 0 {
		*id = Parse(string(text))
	}
	return nil
}

// Parts returns the BSON type of the id and its 16 bytes, 12 bytes or text. Both are zero for the zero value.
func Parts(id ID) (bson.Type, string) { return id.typ, id.val }

// AppendValue appends the id as a BSON value.
func AppendValue(dst []byte, id ID) []byte {
	switch id.typ {
	case bson.TypeBinary:
		dst = binary.LittleEndian.AppendUint32(dst, uint32(len(id.val)))
		return append(append(dst, bson.TypeBinaryUUID), id.val...)
	case bson.TypeString:
		dst = binary.LittleEndian.AppendUint32(dst, uint32(len(id.val)+1))
		return append(append(dst, id.val...), 0)
	default:
		return append(dst, id.val...)
	}
}
