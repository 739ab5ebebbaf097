package event

import "github.com/outrelay/outrelay/internal/contract/eventid"

// ID is the id of an event: a UUID, an ObjectId or a string. IDs can be compared with ==. The zero
// value is no id, and with WithID it means the default. String returns the canonical text of the id,
// which is also the header `id` of the record, and IsZero reports whether it is the zero value.
//
// An ID can be a field of your documents, for example to cancel a scheduled event later. In BSON it is a UUID, an ObjectId or a
// string, and the zero value needs omitempty. In JSON it is its text.
type ID = eventid.ID

// NewID returns id as an ID. id is a UUID, which is any array of 16 bytes, an ObjectId, which is any
// array of 12 bytes, or a string.
func NewID[T ~[16]byte | ~[12]byte | ~string](id T) ID { return eventid.New(id) }

// ParseID parses the text of an id that a user has typed, or that a record has. The 36 characters of a UUID and the base64 of
// its bytes give a UUID, 24 hexadecimal digits give an ObjectId, and any other text gives a string id. For a string id
// that looks like one of the others, use NewID.
func ParseID(text string) ID { return eventid.Parse(text) }
