package event

import (
	"slices"
	"time"

	"github.com/google/uuid"
	"go.mongodb.org/mongo-driver/v2/bson"
)

// Option sets an optional part of an event. See New.
type Option func(*Event)

// WithID sets the id of the event. With an id that the service derives from its own data, a
// repeated append fails. The id must be unique in its collection as long as the envelope is stored.
// Consumers use it to recognize repeated deliveries. Defaults to a new UUID of version 7.
func WithID[T uuid.UUID | bson.ObjectID | string](id T) Option {
	v := NewID(id)
	return func(e *Event) { e.id = v }
}

// WithKey sets the key of the record, which also determines the order of events. Defaults to the
// aggregate id.
func WithKey(key string) Option {
	return func(e *Event) {
		if key == "" {
			e.addProblem("key is empty")
		}
		e.key = key
	}
}

// WithTopic sends the event to this topic instead of the one that the routing of the relay selects.
// The relay must allow the topic.
func WithTopic(topic string) Option {
	return func(e *Event) {
		if topic == "" {
			e.addProblem("topic is empty")
		}
		e.topic = topic
	}
}

// WithPartition sends the event to partition p instead of the one that the hash of the key selects.
// Events with the same key have no order across partitions.
func WithPartition(p int32) Option {
	return func(e *Event) {
		if p < 0 {
			e.addProblem("partition %d is negative", p)
		}
		e.partition = p
	}
}

// WithHeader adds a header to the record. A nil value is null. Several headers may have the same
// name. The names id and outrelay-* are reserved.
func WithHeader(name string, value []byte) Option {
	value = slices.Clone(value)
	return func(e *Event) { e.headers = append(slices.Clip(e.headers), Header{name, value}) }
}

// WithContentType sets the media type of the payload, for example "application/json".
func WithContentType(t string) Option { return func(e *Event) { e.contentType = t } }

// WithSchemaVersion sets the version of the schema of the payload.
func WithSchemaVersion(v string) Option { return func(e *Event) { e.schemaVersion = v } }

// WithSource sets the CloudEvents attribute source, a URI reference that identifies the producer.
func WithSource(uri string) Option { return func(e *Event) { e.source = uri } }

// WithSubject sets the CloudEvents attribute subject.
func WithSubject(s string) Option { return func(e *Event) { e.subject = s } }

// WithTime sets when the event happened, by the clock of the service, with millisecond precision.
// It is sent as a header. The timestamp of the record is the time of the commit.
func WithTime(t time.Time) Option { return func(e *Event) { e.time = checkDate(e, "time", t) } }

// WithDueAt makes the event a scheduled one. It is not delivered before the time t, which refers to
// the server's clock and has millisecond precision.
func WithDueAt(t time.Time) Option { return func(e *Event) { e.dueAt = checkDate(e, "dueAt", t) } }

// WithExpiresAt sets the time after which the event is useless, with millisecond precision. If the
// relay cannot deliver the event before, it moves it to the dead letters, or drops it if so
// configured.
func WithExpiresAt(t time.Time) Option {
	return func(e *Event) { e.expiresAt = checkDate(e, "expiresAt", t) }
}

// checkDate returns t. It reports the zero time as a problem, because it usually is a forgotten
// value.
func checkDate(e *Event, name string, t time.Time) time.Time {
	if t.IsZero() {
		e.addProblem("%s is the zero time", name)
	}
	return t
}
