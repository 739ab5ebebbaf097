package event

import (
	"slices"
	"time"

	"github.com/outrelay/outrelay/internal/contract/envelope"
	"github.com/outrelay/outrelay/internal/contract/eventid"
	"github.com/outrelay/outrelay/internal/contract/record"
)

// Option sets an optional part of an event. If two options set the same part, the last one counts.
type Option interface{ apply(*Event) }

type option func(*Event)

func (o option) apply(event *Event) { o(event) }

// WithID sets the id of the event: a UUID, an ObjectID or a string of any package, or an ID. With
// an id that the service derives from its own data, a repeated append fails. The id must be unique
// in its collection as long as the envelope is stored, and as long as consumers keep marks of handled
// messages (consumer.WithRetention): they recognize repeated deliveries by it. Defaults to a new UUID of version 7.
func WithID[T ~[16]byte | ~[12]byte | ~string | ID](id T) Option {
	eventID, ok := any(id).(ID)
	if !ok {
		eventID = eventid.Of(id)
	}
	return option(func(event *Event) { event.id = eventID })
}

// WithKey sets the key of the record, which also determines the order of events. Defaults to the id
// of the aggregate.
func WithKey(key string) Option { return option(func(event *Event) { event.key = key }) }

// WithTopic sends the event to this topic. The relay must allow the topic. Defaults to the topic
// that the routing of the relay selects.
func WithTopic(topic string) Option { return option(func(event *Event) { event.topic = topic }) }

// WithPartition sends the event to a partition. Events with the same key have no order across
// partitions. Defaults to a negative number, with which the hash of the key selects the partition.
func WithPartition(partition int32) Option {
	return option(func(event *Event) { event.partition = max(partition, envelope.AnyPartition) })
}

// WithHeader adds a header to the record. A nil value is null. Several headers may have the same
// name. The names id and outrelay-* are reserved.
func WithHeader(name string, value []byte) Option {
	value = slices.Clone(value)
	return option(func(event *Event) { event.headers = append(slices.Clip(event.headers), Header{name, value}) })
}

// WithDedupKey makes consumers handle only the first of all events with this key, as long as their
// inbox retains it. Defaults to the id of the event.
func WithDedupKey(key string) Option {
	return option(func(event *Event) {
		if key == "" {
			event.headers = slices.DeleteFunc(slices.Clone(event.headers), func(header Header) bool { return header.Key == record.HeaderDedupKey })
		}
		event.setHeader(record.HeaderDedupKey, key)
	})
}

// WithPayload replaces the payload and its content type. Middleware uses it with Event.With.
func WithPayload(payload Payload) Option {
	return option(func(event *Event) { event.payload = payload })
}

// WithSchemaVersion sets the version of the schema of the payload. Defaults to none.
func WithSchemaVersion(version string) Option {
	return option(func(event *Event) { event.schemaVersion = version })
}

// WithSource sets the CloudEvents attribute source, a URI reference that identifies the producer.
// Defaults to the source in the configuration of the relay.
func WithSource(uri string) Option { return option(func(event *Event) { event.source = uri }) }

// WithSubject sets the CloudEvents attribute subject. Defaults to the id of the aggregate.
func WithSubject(subject string) Option {
	return option(func(event *Event) { event.subject = subject })
}

// WithTime sets when the event happened, by the clock of the service, with millisecond precision.
// It is sent as a header. The timestamp of the record is the time of the commit. Defaults to none.
func WithTime(moment time.Time) Option { return option(func(event *Event) { event.time = moment }) }

// WithDueAt makes the event a scheduled one: the relay does not deliver it before moment, by the clock
// of the server, with millisecond precision. outbox.Box.Schedule applies it. The zero time is a
// mistake, because the event would be delivered at once. Defaults to an event that is not scheduled.
func WithDueAt(moment time.Time) Option {
	return option(func(event *Event) { event.dueAt, event.scheduled = moment, true })
}

// WithExpiry sets the time after which the event is useless, with millisecond precision. If the
// relay cannot deliver the event before, it moves it to the dead letters, or drops it if so
// configured. The record carries the time in a header: a consumer that gets the message later does
// not handle it either. Defaults to never.
func WithExpiry(moment time.Time) Option {
	return option(func(event *Event) { event.expiresAt = moment })
}
