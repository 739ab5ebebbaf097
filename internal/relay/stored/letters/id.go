package letters

import (
	"crypto/sha256"
	"encoding/base32"
	"encoding/binary"
	"encoding/hex"
	"strings"

	"go.mongodb.org/mongo-driver/v2/bson"
)

// DigestOf returns a digest of the bytes of an envelope. It distinguishes two envelopes with one id.
func DigestOf(raw []byte) []byte {
	sum := sha256.Sum256(raw)
	return sum[:16]
}

// idPrefix distinguishes the id of a letter from the id of an envelope, so that operators may name a letter by either.
const idPrefix = "dead-"

var idEncoding = base32.NewEncoding("0123456789abcdefghjkmnpqrstvwxyz").WithPadding(base32.NoPadding)

// IsID reports whether text has the form of the id of a letter.
func IsID(text string) bool {
	digits, ok := strings.CutPrefix(text, idPrefix)
	_, err := idEncoding.DecodeString(digits)
	return ok && err == nil && len(digits) == idEncoding.EncodedLen(idBytes)
}

const idBytes = 16

// id returns the `_id` of the letter, such as dead-01h3…: a digest of what distinguishes it from others. Two events with
// one id of an envelope have two positions, so they leave two letters, as do two topics that reject one envelope. If the
// same failure is stored again, the id is the same.
func (l *Letter) id(envelopeID bson.RawValue) string {
	hash := sha256.New()
	add := func(part []byte) {
		hash.Write(binary.BigEndian.AppendUint64(nil, uint64(len(part))))
		hash.Write(part)
	}

	add([]byte(l.Watcher))
	add([]byte(l.NS))
	add([]byte{byte(envelopeID.Type)})
	add(envelopeID.Value)
	add(binary.BigEndian.AppendUint32(nil, uint32(l.Delivery)))
	add([]byte(l.Pos))
	add([]byte(l.Topic))

	return idPrefix + idEncoding.EncodeToString(hash.Sum(nil)[:idBytes])
}

// Bounds of the fields that are stored next to the envelope.
const (
	maxIDBytes  = 1 << 10
	maxPosBytes = 4 << 10
)

// ShortID returns the value that a letter stores as the id of its envelope: value itself, or the document
// {sha256: "<hexadecimal>", bytes: n} if value has more than 1 KiB. With the whole id next to the envelope, the letter might
// exceed the limit of a document.
func ShortID(value bson.RawValue) bson.RawValue {
	if len(value.Value) <= maxIDBytes {
		return value
	}

	sum := sha256.Sum256(append([]byte{byte(value.Type)}, value.Value...))
	// The error can be ignored: a text and a number can always be encoded.
	doc, _ := bson.Marshal(bson.D{
		{Key: "sha256", Value: hex.EncodeToString(sum[:])},
		{Key: "bytes", Value: int64(len(value.Value))},
	})
	return bson.RawValue{Type: bson.TypeEmbeddedDocument, Value: doc}
}

// ShortPos returns the value that a letter stores as the position of its envelope: pos itself, or its beginning and a
// digest if pos has more than 4 KiB. The position of an event contains the id of the envelope. It compares with other
// positions like pos, because two positions differ before the id. The value of a value is the value itself.
func ShortPos(pos string) string {
	if len(pos) <= maxPosBytes {
		return pos
	}
	sum := sha256.Sum256([]byte(pos))
	// The sign sorts before every digit, so the result is less than pos.
	end := "#" + hex.EncodeToString(sum[:])
	return pos[:maxPosBytes-len(end)] + end
}
