package event

import (
	"slices"
	"time"

	"github.com/google/uuid"

	"github.com/outrelay/outrelay/internal/contract/envelope"
)

// Aggregate is the thing that an event is about.
type Aggregate struct {
	Type string `bson:"type,omitempty"` // the kind of thing, for example "order"
	ID   string `bson:"id,omitempty"`   // for example the number of the order
}

// Event is an event that can be appended. It is immutable. Create it with Type.New or New. The zero
// value is not valid.
type Event struct {
	id                     ID
	about                  Aggregate
	name                   string
	payload                Payload
	key, topic             string
	partition              int32
	headers                []Header
	schemaVersion          string
	source, subject        string
	time, dueAt, expiresAt time.Time
	scheduled              bool // WithDueAt was applied, perhaps with the zero time
}

// Header is one header of an event. Several headers may have the same name.
type Header struct {
	// Key is the name.
	Key string

	// Value is copied to the record unchanged. Nil is a null value.
	Value []byte
}

// New returns an event whose type is known only at run time. about.Type selects the topic and
// about.ID is the key, unless an option sets another one. name is the name of the event, for
// example "OrderPlaced". If the type is known at compile time, use Type.New.
func New(about Aggregate, name string, payload Payload, opts ...Option) Event {
	event := Event{about: about, name: name, payload: payload, partition: envelope.AnyPartition}.With(opts...)
	if event.id.IsZero() {
		// NewV7 fails only if the system has no random numbers, and Go stops the process then.
		event.id = NewID(uuid.Must(uuid.NewV7()))
	}
	return event
}

// With returns a copy of the event to which opts are applied.
func (e Event) With(opts ...Option) Event {
	// Clipped, so that an append of an option copies the slice instead of changing e.
	e.headers = slices.Clip(e.headers)
	for _, o := range opts {
		o.apply(&e)
	}
	return e
}

// ID returns the id of WithID, or else a UUID of version 7 that New has made.
func (e Event) ID() ID { return e.id }

// Name returns the name of the event, for example "OrderPlaced".
func (e Event) Name() string { return e.name }

// Aggregate returns the thing that the event is about.
func (e Event) Aggregate() Aggregate { return e.about }

// Key returns the key of WithKey, or else the id of the aggregate.
func (e Event) Key() string {
	if e.key != "" {
		return e.key
	}
	return e.about.ID
}

// Topic returns the topic of WithTopic, or "", which means that the relay selects the topic.
func (e Event) Topic() string { return e.topic }

// Payload returns the value of the record as the relay will publish it, and nil for a tombstone.
// The bytes must not be changed. The error reports a payload that could not be encoded.
func (e Event) Payload() ([]byte, error) {
	if e.payload.problem != "" {
		return nil, &InvalidError{ID: e.id, Problems: []string{e.payload.problem}}
	}
	return e.payload.value()
}

// ContentType returns the media type of the payload, or "".
func (e Event) ContentType() string { return e.payload.contentType }

// Header returns the value of the first header with this name, and whether there is one. The bytes
// must not be changed.
func (e Event) Header(name string) ([]byte, bool) {
	i := slices.IndexFunc(e.headers, func(header Header) bool { return header.Key == name })
	if i < 0 {
		return nil, false
	}
	return e.headers[i].Value, true
}

// Headers returns a copy of the headers in their order. The values are shared with the event and
// must not be changed.
func (e Event) Headers() []Header { return slices.Clone(e.headers) }

// ExpiresAt returns the time of WithExpiry, and whether the event expires.
func (e Event) ExpiresAt() (time.Time, bool) { return e.expiresAt, !e.expiresAt.IsZero() }
