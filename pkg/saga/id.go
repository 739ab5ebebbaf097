package saga

import (
	"fmt"
	"strconv"

	"github.com/google/uuid"
)

// Identifier is what may identify a saga. Each kind is stored as itself, and all sagas of a collection are of one kind.
type Identifier interface {
	uuid.UUID | string | int32 | int64
}

// IDKind names a kind of Identifier.
type IDKind string

// The kinds of Identifier.
const (
	KindUUID   IDKind = "uuid" // binary of subtype 4
	KindString IDKind = "string"
	KindInt32  IDKind = "int32"
	KindInt64  IDKind = "int64"
)

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

// FormatID is the canonical text of an id of any kind, as it stands in the header saga-id.
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

// ParseID reads the text of an id of that kind: the result is a uuid.UUID, string, int32 or int64. The error is an
// *IDError.
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

func parseID[I Identifier](text string) (I, error) {
	id, err := ParseID(kindOf[I](), text)
	if err != nil {
		return *new(I), err
	}
	return id.(I), nil
}

// missing reports whether id is one that stands for none: the nil UUID or the empty string. 0 is a number like another.
func missing[I Identifier](id I) bool {
	switch v := any(id).(type) {
	case uuid.UUID:
		return v == uuid.Nil
	case string:
		return v == ""
	}
	return false
}
