package event

import (
	"errors"
	"fmt"
	"reflect"

	"github.com/google/uuid"
	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/envelope"
)

// ID is the id of an event: a UUID, an ObjectId or a string. IDs can be compared with ==. The zero
// value is no id, and with WithID it means the default.
type ID struct {
	typ bson.Type
	val string // 16 bytes, 12 bytes, or the text
}

// NewID returns id as an ID. id is a UUID, which is any array of 16 bytes, an ObjectId, which is any
// array of 12 bytes, or a string.
func NewID[T ~[16]byte | ~[12]byte | ~string](id T) ID { return idOf(id) }

// idOf is NewID for a value of a type that the compiler has checked already.
func idOf(id any) ID {
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

// ParseID parses the text of an id that a user has typed, or that a record has. The 36 characters of a UUID and the base64 of
// its bytes give a UUID, 24 hexadecimal digits give an ObjectId, and any other text gives a string id. For a string id
// that looks like one of the others, use NewID.
func ParseID(text string) ID {
	if id, ok := envelope.UUIDOfBase64([]byte(text)); ok {
		return NewID(id)
	}
	if envelope.LooksBinary([]byte(text)) {
		if len(text) == 24 {
			if id, err := bson.ObjectIDFromHex(text); err == nil {
				return NewID(id)
			}
		} else if id, err := uuid.Parse(text); err == nil {
			return NewID(id)
		}
	}

	return NewID(text)
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
	return byte(id.typ), id.appendValue(nil), nil
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

// appendValue appends the id as a BSON value.
func (id ID) appendValue(dst []byte) []byte {
	switch id.typ {
	case bson.TypeBinary:
		dst = appendInt32(dst, int32(len(id.val)))
		return append(append(dst, bson.TypeBinaryUUID), id.val...)
	case bson.TypeString:
		return appendStringValue(dst, id.val)
	default:
		return append(dst, id.val...)
	}
}
