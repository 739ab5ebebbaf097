package mongodb

import (
	"encoding/base64"
	"errors"
	"fmt"

	"go.mongodb.org/mongo-driver/v2/bson"
)

// IfNull returns the expression for field, or for otherwise if the field is null or missing.
func IfNull(field string, otherwise any) bson.D {
	return bson.D{{Key: "$ifNull", Value: bson.A{field, otherwise}}}
}

// Literal returns the expression for value itself, even if value looks like a field or an operator.
func Literal(value any) bson.D { return bson.D{{Key: "$literal", Value: value}} }

// Fields returns the projection that selects the named fields and `_id`.
func Fields(names ...string) bson.D { return Ascending(names...) }

// ErrCursor is returned for a cursor that no page of the list returned.
var ErrCursor = errors.New("invalid cursor: pass the cursor that the previous page of this list returned")

// EncodeCursor returns the text of a place in a list.
func EncodeCursor(place any) (string, error) {
	data, err := bson.Marshal(place)
	if err != nil {
		return "", fmt.Errorf("encoding a cursor: %w", err)
	}
	return base64.RawURLEncoding.EncodeToString(data), nil
}

// ParseCursor reads the text of [EncodeCursor] into place. The error is [ErrCursor].
func ParseCursor(text string, place any) error {
	data, err := base64.RawURLEncoding.DecodeString(text)
	if err != nil || bson.Raw(data).Validate() != nil || bson.Unmarshal(data, place) != nil {
		return ErrCursor
	}
	return nil
}

// CloneValue returns a copy of value that does not alias a response.
func CloneValue(value bson.RawValue) bson.RawValue {
	return bson.RawValue{Type: value.Type, Value: append([]byte(nil), value.Value...)}
}
