package event

import (
	"slices"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/envelope"
)

// Payload returns the value of the record as it will be published: the bytes of a []byte or a
// string, relaxed Extended JSON for a document or an array, and nil for a tombstone. The bytes must
// not be changed. The error reports an invalid document.
func (e Event) Payload() ([]byte, error) {
	if e.payloadType == bson.TypeNull || e.payloadType == 0 {
		return nil, nil
	}

	// An empty value is not a tombstone, so it must not be nil.
	v := envelope.View{PayloadType: byte(e.payloadType), Payload: e.payload}
	out, err := envelope.AppendPayload([]byte{}, &v)
	return slices.Clip(out), err
}

// Topic returns the topic of WithTopic, or "".
func (e Event) Topic() string { return e.topic }

// ContentType returns the content type of WithContentType, or "".
func (e Event) ContentType() string { return e.contentType }

// SchemaVersion returns the version of WithSchemaVersion, or "".
func (e Event) SchemaVersion() string { return e.schemaVersion }

// ExpiresAt returns the time of WithExpiresAt, and whether the event expires.
func (e Event) ExpiresAt() (time.Time, bool) { return e.expiresAt, !e.expiresAt.IsZero() }

// WithType replaces the name of the event. It is meant for With.
func WithType(typ string) Option { return func(e *Event) { e.typ = typ } }

// WithPayload replaces the payload by any payload that New accepts. It is meant for With.
func WithPayload(payload any) Option { return func(e *Event) { e.setPayload(payload) } }

// WithoutHeader removes all headers with this name. It is meant for With.
func WithoutHeader(name string) Option {
	return func(e *Event) {
		e.headers = slices.DeleteFunc(slices.Clone(e.headers), func(h Header) bool { return h.Key == name })
	}
}
