package event

import (
	"slices"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
)

// Payload is the record's value as it will be published: the bytes of a []byte or a string as they are, documents and arrays
// as relaxed Extended JSON, nil for a tombstone. The bytes are not to be changed.
func (e Event) Payload() ([]byte, error) {
	v := View{PayloadType: byte(e.payloadType), Payload: e.payload}
	switch e.payloadType {
	case bson.TypeBinary:
		v.Payload, _, _ = blob(e.payload)
	case bson.TypeString:
		v.Payload = text(e.payload)
	case bson.TypeEmbeddedDocument, bson.TypeArray:
	default:
		return nil, nil
	}
	out, err := AppendPayload([]byte{}, &v)
	return slices.Clip(out), err
}

// Topic is that of WithTopic, or "".
func (e Event) Topic() string { return e.topic }

// ContentType is that of WithContentType, or "".
func (e Event) ContentType() string { return e.contentType }

// SchemaVersion is that of WithSchemaVersion, or "".
func (e Event) SchemaVersion() string { return e.schemaVersion }

// ExpiresAt is when the event is worth nothing any more, and whether it expires.
func (e Event) ExpiresAt() (time.Time, bool) { return e.expiresAt, !e.expiresAt.IsZero() }

// WithType replaces the event's type.
func WithType(typ string) Option { return func(e *Event) { e.typ = typ } }

// WithPayload replaces the payload, which may be all that New takes.
func WithPayload(payload any) Option { return func(e *Event) { e.setPayload(payload) } }

// WithoutHeader takes the headers of that name away.
func WithoutHeader(name string) Option {
	return func(e *Event) {
		e.headers = slices.DeleteFunc(slices.Clone(e.headers), func(h Header) bool { return h.Key == name })
	}
}
