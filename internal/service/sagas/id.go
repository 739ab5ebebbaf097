package sagas

import (
	"errors"
	"fmt"
	"strconv"

	"github.com/google/uuid"
)

// Kind is the name of a type of id. Each kind is stored as its own BSON type, and all sagas of a collection have ids of the
// same kind.
type Kind string

// Kinds of ids.
const (
	UUID   Kind = "uuid" // binary of subtype 4
	String Kind = "string"
	Int32  Kind = "int32"
	Int64  Kind = "int64"
)

// ErrNoID means that a text is not an id of the expected kind.
var ErrNoID = errors.New("no saga id")

// FormatID returns the canonical text of an id of any kind, which is also the value of the header
// saga-id.
func FormatID(id any) string {
	switch typed := id.(type) {
	case uuid.UUID:
		return typed.String()
	case string:
		return typed
	case int32:
		return strconv.FormatInt(int64(typed), 10)
	case int64:
		return strconv.FormatInt(typed, 10)
	}

	return fmt.Sprint(id)
}

// ParseID parses the text of an id of this kind. The result is a uuid.UUID, string, int32 or int64.
// The nil UUID and the empty string are invalid. The error is ErrNoID.
func ParseID(kind Kind, text string) (any, error) {
	// Each kind accepts exactly the texts that it writes, so the id of a saga is the same in each message.
	switch kind {
	case UUID:
		if id, err := uuid.Parse(text); err == nil && id != uuid.Nil {
			return id, nil
		}
	case String:
		if text != "" {
			return text, nil
		}
	case Int32:
		if n, err := strconv.ParseInt(text, 10, 32); err == nil {
			return int32(n), nil
		}
	case Int64:
		if n, err := strconv.ParseInt(text, 10, 64); err == nil {
			return n, nil
		}
	}

	return nil, fmt.Errorf("%w: %q is not a valid %s", ErrNoID, text, kind)
}
