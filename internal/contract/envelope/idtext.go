package envelope

import (
	"encoding/base64"
	"strconv"

	"go.mongodb.org/mongo-driver/v2/bson"
)

// An id has a canonical text. In the records of Debezium's router, a UUID has another text: base64. A string that looks like
// one of these texts is ambiguous, and its record states its type, so each text stands for one id.

// AppendID appends the canonical text of the id to dst: a UUID as groups of lower-case digits, an
// ObjectId as 24 hexadecimal digits, and a string unchanged.
func (v *View) AppendID(dst []byte) []byte { return AppendText(dst, bson.Type(v.IDType), v.ID) }

// CanonicalText returns the canonical text of the value of an id or a key. It returns "" for a value of another type.
func CanonicalText(value bson.RawValue) string {
	switch value.Type {
	case bson.TypeString:
		text, _ := value.StringValueOK()
		return text

	case bson.TypeInt32, bson.TypeInt64:
		return strconv.FormatInt(value.AsInt64(), 10)

	case bson.TypeObjectID, bson.TypeBinary:
		if id, err := ParseID(value.Type, value.Value); err == nil {
			return string(AppendText(nil, value.Type, id))
		}
	}
	return ""
}

// AppendRecordID appends the id of the record: that of the event, or else `_id`. With asBase64, a UUID is written as base64.
func (v *View) AppendRecordID(dst []byte, asBase64 bool) []byte {
	uuid := v.EventUUID
	if v.EventID == nil && bson.Type(v.IDType) == bson.TypeBinary {
		uuid = v.ID
	}

	switch {
	case asBase64 && uuid != nil:
		return base64.StdEncoding.AppendEncode(dst, uuid)
	case v.EventID != nil:
		return append(dst, v.EventID...)
	}
	return v.AppendID(dst)
}

// AmbiguousID reports whether `_id` is a string that looks like a UUID or an ObjectId, so that the
// BSON type cannot be derived from the text.
func (v *View) AmbiguousID() bool {
	return v.IDType == byte(bson.TypeString) && LooksBinary(v.ID)
}

// strictBase64 accepts one text for each UUID.
var strictBase64 = base64.StdEncoding.Strict()

// UUIDOfBase64 returns the UUID whose base64 is text. It does not allocate.
func UUIDOfBase64(text []byte) (id [16]byte, ok bool) {
	if len(text) != 24 || text[22] != '=' {
		return id, false
	}
	var room [18]byte
	n, err := strictBase64.Decode(room[:], text)
	return [16]byte(room[:16]), err == nil && n == len(id)
}

// LooksBinary reports whether text has the form of a UUID, also as base64, or of an ObjectId. Digits may be in upper or
// lower case.
func LooksBinary(text []byte) bool {
	switch len(text) {
	case 24:
		if _, ok := UUIDOfBase64(text); ok {
			return true
		}
		for _, c := range text {
			if !isHex(c) {
				return false
			}
		}
		return true
	case 36:
		for i, c := range text {
			// A UUID has dashes at these places.
			if i == 8 || i == 13 || i == 18 || i == 23 {
				if c != '-' {
					return false
				}
			} else if !isHex(c) {
				return false
			}
		}
		return true
	}

	return false
}

func isHex(char byte) bool {
	return char >= '0' && char <= '9' || char >= 'a' && char <= 'f' || char >= 'A' && char <= 'F'
}
