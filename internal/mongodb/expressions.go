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

// Literal returns the expression for v itself, even if v looks like a field or an operator.
func Literal(v any) bson.D { return bson.D{{Key: "$literal", Value: v}} }

// Fields returns the projection that selects the named fields and `_id`.
func Fields(names ...string) bson.D { return Ascending(names...) }

// ErrCursor is returned for a cursor that no page of the list returned.
var ErrCursor = errors.New("invalid cursor: pass the cursor that the previous page of this list returned")

// EncodeCursor returns the text of a place in a list.
func EncodeCursor(place any) (string, error) {
	b, err := bson.Marshal(place)
	if err != nil {
		return "", fmt.Errorf("encoding a cursor: %w", err)
	}
	return base64.RawURLEncoding.EncodeToString(b), nil
}

// ParseCursor reads the text of [EncodeCursor] into place. The error is [ErrCursor].
func ParseCursor(text string, place any) error {
	b, err := base64.RawURLEncoding.DecodeString(text)
	if err != nil || bson.Raw(b).Validate() != nil || bson.Unmarshal(b, place) != nil {
		return ErrCursor
	}
	return nil
}

// CloneValue returns a copy of v that does not alias a reply.
func CloneValue(v bson.RawValue) bson.RawValue {
	return bson.RawValue{Type: v.Type, Value: append([]byte(nil), v.Value...)}
}
