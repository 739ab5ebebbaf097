package envelope

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"unicode/utf8"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/contract/record"
)

var (
	// errBroken means that a value is invalid, or nested deeper than 256.
	errBroken = errors.New("the value is broken or nested too deep")
	// ErrTooLong means that a text would exceed its limit.
	ErrTooLong = errors.New("the text exceeds its limit")
)

// NoLimit is the limit of a text that may have any length.
const NoLimit = math.MaxInt

// boundedText is a text that is appended to dst. It stops before it takes more memory than its limit, apart from a few bytes:
// a value of a few bytes may become a hundred times as many bytes of text.
type boundedText struct {
	dst  []byte
	most int  // of len(dst)
	full bool // something did not fit, so the text is not complete
}

// newBoundedText returns a text that adds at most the given bytes to dst.
func newBoundedText(dst []byte, most int) boundedText {
	if most > NoLimit-len(dst) {
		most = NoLimit - len(dst)
	}
	return boundedText{dst: dst, most: len(dst) + most}
}

// fits reports whether n more bytes are within the limit. If not, the text is full, and the writer has to stop.
func (t *boundedText) fits(n int) bool {
	t.full = t.full || n > t.most-len(t.dst)
	return !t.full
}

// finish returns the text and its error. ok means that the value was valid as far as it was written.
func (t *boundedText) finish(ok bool) ([]byte, error) {
	switch {
	case !t.fits(0):
		return t.dst, ErrTooLong
	case !ok:
		return t.dst, errBroken
	}
	return t.dst, nil
}

// escapedAtOnce is the length of the part of a text that is escaped before the limit is checked again. Each byte becomes at
// most six.
const escapedAtOnce = 16 << 10

// escapes are the escapes of a JSON string: of the standard library, or of Java. A function as an argument would cost an
// allocation.
type escapes bool

const (
	usualEscapes escapes = false
	javaEscapes  escapes = true
)

// writeQuoted writes text as a JSON string.
func (t *boundedText) writeQuoted(text []byte, escapes escapes) {
	if !t.fits(len(text)) {
		return
	}
	// Otherwise a long text would be copied at each step of its growth.
	if len(text) > escapedAtOnce {
		t.dst = slices.Grow(t.dst, len(text)+2)
	}

	t.dst = append(t.dst, '"')
	for len(text) > escapedAtOnce && t.fits(0) {
		// A character must not be cut. Bytes that are no characters may be.
		end := escapedAtOnce
		for end > escapedAtOnce-utf8.UTFMax && !utf8.RuneStart(text[end]) {
			end--
		}
		t.dst = appendPart(t.dst, text[:end], escapes)
		text = text[end:]
	}
	if t.fits(0) {
		t.dst = append(appendPart(t.dst, text, escapes), '"')
	}
}

func appendPart(dst, text []byte, escapes escapes) []byte {
	if escapes == javaEscapes {
		return appendJavaEscaped(dst, text)
	}
	return appendEscaped(dst, text)
}

// newTooLarge returns a rejection of class message_too_large.
func newTooLarge(format string, args ...any) error {
	return &record.Rejection{Class: record.MessageTooLarge, Reason: fmt.Sprintf(format, args...)}
}

// checkText returns a rejection if the text of the field called name is too long.
func checkText(name []byte, n, most int) error {
	if n > most {
		return newTooLarge("%s has %d bytes; at most %d are allowed", clipName(name), n, most)
	}
	return nil
}

// newMalformed returns a rejection of class malformed.
func newMalformed(format string, args ...any) error {
	return &record.Rejection{Class: record.Malformed, Reason: fmt.Sprintf(format, args...)}
}

// clipName shortens the name of a field, which can have any length.
func clipName(name []byte) []byte { return name[:min(len(name), 64)] }

// typeName returns the name of a BSON type for an error message.
func typeName(bsonType bson.Type) string {
	if text := bsonType.String(); text != "invalid" {
		return "of type " + text
	}
	return fmt.Sprintf("of unknown type 0x%02x", byte(bsonType))
}
