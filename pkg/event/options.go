package event

import (
	"slices"
	"time"

	"github.com/google/uuid"
	"go.mongodb.org/mongo-driver/v2/bson"
)

// Option sets one optional part of an event.
type Option func(*Event)

// WithID sets the id, for one that the service makes itself so that appending twice is refused. Defaults to a UUID of
// version 7. An id must be unique in its collection for as long as the envelope is kept; consumers recognise a repeated
// delivery by it.
func WithID[T uuid.UUID | bson.ObjectID | string](id T) Option {
	v := NewID(id)
	return func(e *Event) { e.id = v }
}

// WithKey sets the ordering key, which is also the record's key. Defaults to the aggregate's id.
func WithKey(key string) Option {
	return func(e *Event) {
		if key == "" {
			e.problem("key is empty")
		}
		e.key = key
	}
}

// WithTopic sends the event to that topic instead of where the routing would. The relay's allow-list applies.
func WithTopic(topic string) Option {
	return func(e *Event) {
		if topic == "" {
			e.problem("topic is empty")
		}
		e.topic = topic
	}
}

// WithPartition sends the event to that partition instead of the one that the key hashes to. Events of one key in several
// partitions have no order.
func WithPartition(p int32) Option {
	return func(e *Event) {
		if p < 0 {
			e.problem("partition %d is negative", p)
		}
		e.partition = p
	}
}

// WithHeader adds a record header; nil is a null value. Names may repeat. The names id and outrelay-* are taken.
func WithHeader(name string, value []byte) Option {
	value = slices.Clone(value)
	return func(e *Event) { e.headers = append(slices.Clip(e.headers), Header{name, value}) }
}

// WithContentType says what the payload's bytes are, for example "application/json".
func WithContentType(t string) Option { return func(e *Event) { e.contentType = t } }

// WithSchemaVersion sets the version of the payload's schema.
func WithSchemaVersion(v string) Option { return func(e *Event) { e.schemaVersion = v } }

// WithSource sets the CloudEvents source, a URI reference that names the producer.
func WithSource(uri string) Option { return func(e *Event) { e.source = uri } }

// WithSubject sets the CloudEvents subject.
func WithSubject(s string) Option { return func(e *Event) { e.subject = s } }

// WithTime sets when the thing happened, by the service's clock, kept to the millisecond. It travels in a header; the
// record's own timestamp is the commit's.
func WithTime(t time.Time) Option { return func(e *Event) { e.time = date(e, "time", t) } }

// WithDueAt makes the event a scheduled one: it is delivered at that time by the server's clock, to the millisecond, and
// not before.
func WithDueAt(t time.Time) Option { return func(e *Event) { e.dueAt = date(e, "dueAt", t) } }

// WithExpiresAt says that the event is worth nothing after that time: the relay moves one that it could not deliver
// before to the dead letters, or drops it where its policy says so.
func WithExpiresAt(t time.Time) Option {
	return func(e *Event) { e.expiresAt = date(e, "expiresAt", t) }
}

// date refuses a zero time, which is a forgotten one.
func date(e *Event, name string, t time.Time) time.Time {
	if t.IsZero() {
		e.problem("%s is the zero time", name)
	}
	return t
}
