package event

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/google/uuid"
	"go.mongodb.org/mongo-driver/v2/bson"
)

// Event is an event that a service appends to its outbox. It is immutable; With makes a changed copy. The zero value is
// not valid.
type Event struct {
	id                         ID
	aggregateType, aggregateID string
	typ                        string
	payloadType                bson.Type
	payload                    []byte // as a BSON value
	key, topic                 string
	partition                  int32
	headers                    []Header
	contentType, schemaVersion string
	source, subject            string
	time, dueAt, expiresAt     time.Time
	problems                   []string // of New and of options
}

// Header is one header of an event. Names may repeat; the bytes reach the record unchanged, and a nil value is a null.
type Header struct {
	Key   string
	Value []byte
}

// New makes an event.
//
// aggregateType chooses the topic (`outbox.event.<aggregateType>` unless routed otherwise); aggregateID is the ordering
// key unless WithKey says another: events of one key reach their topic in commit order; typ is the event's name.
//
// The payload becomes the record's value:
//
//	[]byte                        those bytes
//	string, json.RawMessage       its bytes
//	nil                           a null value: a tombstone where the topic is compacted
//	bson.D, bson.M, struct, map   stored as a document, published as relaxed Extended JSON on one line
//	bson.A, slice                 stored as an array, published likewise
//
// A nil []byte is an empty value, not a tombstone: only the untyped nil says that. []byte and documents are copied or
// encoded at once, so the caller may change them afterwards.
//
// Mistakes are kept and reported by Validate, by MarshalBSON and by Append.
func New(aggregateType, aggregateID, typ string, payload any, opts ...Option) Event {
	e := Event{aggregateType: aggregateType, aggregateID: aggregateID, typ: typ, partition: AnyPartition}
	e.setPayload(payload)
	for _, o := range opts {
		o(&e)
	}
	if e.id.IsZero() {
		id, err := uuid.NewV7()
		if err != nil {
			e.problem("making an id: %s", err)
		}
		e.id = NewID(id)
	}
	return e
}

// With returns a copy of the event with more options.
func (e Event) With(opts ...Option) Event {
	e.headers, e.problems = slices.Clip(e.headers), slices.Clip(e.problems)
	for _, o := range opts {
		o(&e)
	}
	return e
}

// ID is the event's id.
func (e Event) ID() ID { return e.id }

// AggregateType is what New was given.
func (e Event) AggregateType() string { return e.aggregateType }

// AggregateID is what New was given.
func (e Event) AggregateID() string { return e.aggregateID }

// Type is the event's name.
func (e Event) Type() string { return e.typ }

// Key is the ordering key: that of WithKey, else the aggregate's id.
func (e Event) Key() string {
	if e.key != "" {
		return e.key
	}
	return e.aggregateID
}

// Headers are the event's headers; the slice is a copy, the values are not.
func (e Event) Headers() []Header { return slices.Clone(e.headers) }

// HasHeader reports whether a header of that name is there.
func (e Event) HasHeader(name string) bool {
	return slices.ContainsFunc(e.headers, func(h Header) bool { return h.Key == name })
}

// DueAt is when a scheduled event is to be delivered, and whether it is scheduled.
func (e Event) DueAt() (time.Time, bool) { return e.dueAt, !e.dueAt.IsZero() }

func (e *Event) problem(format string, args ...any) {
	e.problems = append(e.problems, fmt.Sprintf(format, args...))
}

// setPayload keeps the payload as a BSON value.
func (e *Event) setPayload(payload any) {
	switch p := payload.(type) {
	case nil:
		e.payloadType = bson.TypeNull
		return
	case []byte:
		e.payloadType = bson.TypeBinary
		e.payload = appendBinaryValue(make([]byte, 0, len(p)+5), p)
		return
	case string:
		e.payloadType = bson.TypeString
		e.payload = appendStringValue(make([]byte, 0, len(p)+5), p)
		return
	case json.RawMessage:
		e.setPayload(string(p))
		return
	case bson.Raw:
		if err := p.Validate(); err != nil {
			e.problem("payload: %s", err)
		}
		e.payloadType, e.payload = bson.TypeEmbeddedDocument, slices.Clone(p)
		return
	}
	t, val, err := bson.MarshalValue(payload)
	if err != nil {
		e.problem("payload of type %T: %s", payload, err)
		return
	}
	switch t {
	case bson.TypeEmbeddedDocument, bson.TypeArray, bson.TypeString, bson.TypeBinary:
		e.payloadType, e.payload = t, val
	case bson.TypeNull:
		e.problem("payload is a nil %T; pass an untyped nil for a tombstone", payload)
	default:
		e.problem("payload of type %T is %s in BSON; bytes, a string, nil, a document or an array is wanted", payload, t)
	}
}

// ErrInvalid is what every error of Validate is, in the sense of errors.Is.
var ErrInvalid = errors.New("invalid event")
