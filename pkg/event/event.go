package event

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/google/uuid"
	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/envelope"
)

// Event is an event that a service appends to its outbox. It is immutable: With returns a changed
// copy. The zero value is not valid. Create an Event with New.
type Event struct {
	id                         ID
	aggregateType, aggregateID string
	typ                        string
	payloadType                bson.Type
	payload                    []byte // the bytes of a binary or a string, or BSON of a document or an array
	key, topic                 string
	partition                  int32
	headers                    []Header
	contentType, schemaVersion string
	source, subject            string
	time, dueAt, expiresAt     time.Time
	problems                   []string // mistakes found by New and by options
}

// Header is one header of an event. Several headers may have the same name.
type Header struct {
	// Key is the name.
	Key string

	// Value is copied to the record unchanged. Nil is a null value.
	Value []byte
}

// New returns an event.
//
// aggregateType selects the topic: `outbox.event.<aggregateType>`, unless the relay is configured
// otherwise. aggregateID is the key, unless WithKey sets another one. Events with the same key
// reach their topic in commit order. typ is the name of the event, such as "OrderPlaced". The id is
// a new UUID of version 7, unless WithID sets one.
//
// The payload becomes the value of the record:
//
//	[]byte                        the bytes
//	string, json.RawMessage       its bytes
//	nil                           a null value: a tombstone if the topic is compacted
//	bson.D, bson.M, struct, map   stored as a document, published as relaxed Extended JSON on one line
//	bson.A, slice                 stored as an array, published in the same way
//
// A nil []byte is an empty value. Only an untyped nil is a tombstone. Bytes are copied and
// documents are encoded at once, so the caller may change them after the call.
//
// New does not fail. Validate, MarshalBSON and outbox.Append report all mistakes as an
// *InvalidError.
func New(aggregateType, aggregateID, typ string, payload any, opts ...Option) Event {
	e := Event{aggregateType: aggregateType, aggregateID: aggregateID, typ: typ, partition: envelope.AnyPartition}
	e.setPayload(payload)
	for _, o := range opts {
		o(&e)
	}

	if e.id.IsZero() {
		id, err := uuid.NewV7()
		if err != nil {
			e.addProblem("making an id: %s", err)
		}
		e.id = NewID(id)
	}

	return e
}

// With returns a copy of the event to which opts are applied.
func (e Event) With(opts ...Option) Event {
	// Clipped, so that an append of an option copies the slice instead of changing e.
	e.headers, e.problems = slices.Clip(e.headers), slices.Clip(e.problems)
	for _, o := range opts {
		o(&e)
	}
	return e
}

// ID returns the id of the event.
func (e Event) ID() ID { return e.id }

// AggregateType returns the aggregate type that was passed to New.
func (e Event) AggregateType() string { return e.aggregateType }

// AggregateID returns the aggregate id that was passed to New.
func (e Event) AggregateID() string { return e.aggregateID }

// Type returns the name of the event.
func (e Event) Type() string { return e.typ }

// Key returns the key of WithKey, or else the aggregate id.
func (e Event) Key() string {
	if e.key != "" {
		return e.key
	}
	return e.aggregateID
}

// Headers returns a copy of the headers. The values are shared with the event and must not be
// changed.
func (e Event) Headers() []Header { return slices.Clone(e.headers) }

// HasHeader reports whether the event has a header with this name.
func (e Event) HasHeader(name string) bool {
	return slices.ContainsFunc(e.headers, func(h Header) bool { return h.Key == name })
}

// DueAt returns the due time of a scheduled event, and whether the event is scheduled.
func (e Event) DueAt() (time.Time, bool) { return e.dueAt, !e.dueAt.IsZero() }

func (e *Event) addProblem(format string, args ...any) {
	e.problems = append(e.problems, fmt.Sprintf(format, args...))
}

// setPayload stores the payload as a BSON value.
func (e *Event) setPayload(payload any) {
	switch p := payload.(type) {
	case nil:
		e.payloadType = bson.TypeNull
		return
	case []byte:
		e.payloadType, e.payload = bson.TypeBinary, slices.Clone(p)
		return
	case string:
		e.payloadType, e.payload = bson.TypeString, []byte(p)
		return
	case json.RawMessage:
		e.setPayload(string(p))
		return
	case bson.Raw:
		if err := p.Validate(); err != nil {
			e.addProblem("payload: %s", err)
		}
		e.payloadType, e.payload = bson.TypeEmbeddedDocument, slices.Clone(p)
		return
	}

	t, val, err := bson.MarshalValue(payload)
	if err != nil {
		e.addProblem("payload of type %T: %s", payload, err)
		return
	}

	switch t {
	case bson.TypeEmbeddedDocument, bson.TypeArray:
		e.payloadType, e.payload = t, val
	case bson.TypeString:
		e.setPayload(bson.RawValue{Type: t, Value: val}.StringValue())
	case bson.TypeBinary:
		_, data := bson.RawValue{Type: t, Value: val}.Binary()
		e.setPayload(data)
	case bson.TypeNull:
		// Typed nils usually are mistakes.
		e.addProblem("payload is a nil %T; pass an untyped nil for a tombstone", payload)
	default:
		e.addProblem("payload of type %T is %s in BSON; bytes, a string, nil, a document or an array is wanted", payload, t)
	}
}

// ErrInvalid is the error of every invalid event. Test for it with errors.Is.
var ErrInvalid = errors.New("invalid event")
