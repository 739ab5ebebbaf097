package saga

import (
	"fmt"
	"strconv"

	"github.com/google/uuid"
)

// Identifier lists the types that an id of a saga can have. Each type is stored as its own BSON
// type, and all sagas of a collection have ids of the same type.
type Identifier interface {
	uuid.UUID | string | int32 | int64
}

// IDKind is the name of a type of id.
type IDKind string

// Kinds of ids.
const (
	KindUUID   IDKind = "uuid" // binary of subtype 4
	KindString IDKind = "string"
	KindInt32  IDKind = "int32"
	KindInt64  IDKind = "int64"
)

// kindOf returns the kind of the type I.
func kindOf[I Identifier]() IDKind {
	switch any(*new(I)).(type) {
	case uuid.UUID:
		return KindUUID
	case string:
		return KindString
	case int32:
		return KindInt32
	default:
		return KindInt64
	}
}

// FormatID returns the canonical text of an id of any kind, which is also the value of the header
// saga-id.
func FormatID(id any) string {
	switch v := id.(type) {
	case uuid.UUID:
		return v.String()
	case string:
		return v
	case int32:
		return strconv.FormatInt(int64(v), 10)
	case int64:
		return strconv.FormatInt(v, 10)
	}

	return fmt.Sprint(id)
}

// ParseID parses the text of an id of this kind. The result is a uuid.UUID, string, int32 or int64.
// The nil UUID and the empty string are invalid. The error is an *IDError.
func ParseID(kind IDKind, text string) (any, error) {
	switch kind {
	case KindUUID:
		if id, err := uuid.Parse(text); err == nil && id != uuid.Nil {
			return id, nil
		}
	case KindString:
		if text != "" {
			return text, nil
		}
	case KindInt32:
		if n, err := strconv.ParseInt(text, 10, 32); err == nil {
			return int32(n), nil
		}
	case KindInt64:
		if n, err := strconv.ParseInt(text, 10, 64); err == nil {
			return n, nil
		}
	}

	return nil, &IDError{Text: text, Kind: kind}
}

// parseID parses an id of type I. The error is an *IDError.
func parseID[I Identifier](text string) (I, error) {
	id, err := ParseID(kindOf[I](), text)
	if err != nil {
		return *new(I), err
	}
	return id.(I), nil
}

// isMissingID reports whether id is the nil UUID or the empty string, which stand for no id. The
// number 0 is an ordinary id.
func isMissingID[I Identifier](id I) bool {
	switch v := any(id).(type) {
	case uuid.UUID:
		return v == uuid.Nil
	case string:
		return v == ""
	}
	return false
}
