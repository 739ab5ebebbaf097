package event

import (
	"context"
	"fmt"

	"github.com/outrelay/outrelay/pkg/codec"
)

// Type declares a type of events with payloads of type T. Declare it as a variable of a package,
// with the names of the fields.
type Type[T any] struct {
	// Aggregate is the kind of thing that the events are about, for example "order". The relay
	// derives the topic from it. Required.
	Aggregate string

	// Name is the name of the events, for example "OrderPlaced". Consumers select events by it.
	// Required.
	Name string

	// Codec encodes the payloads. Defaults to codec.JSON.
	Codec codec.Codec
}

// New returns an event about the aggregate id, which is also the key unless WithKey sets another
// one. The payload is encoded at once, so the caller may change it after the call. Validate and
// outbox.Box.Append report a payload that cannot be encoded.
//
// T should be a struct. T must not be string, because a call could then exchange id and payload.
// Declare a named type for payloads that are texts.
func (t Type[T]) New(id string, payload T, opts ...Option) Event {
	encoded := Encode(t.Codec, payload)
	if _, ok := any(payload).(string); ok {
		encoded.problem = "payload is a plain string, which a call could exchange with the id: declare a named type"
	}
	return New(Aggregate{Type: t.Aggregate, ID: id}, t.Name, encoded, opts...)
}

// Tombstone returns an event with a null value, which removes the key from a compacted topic.
func (t Type[T]) Tombstone(id string, opts ...Option) Event {
	return New(Aggregate{Type: t.Aggregate, ID: id}, t.Name, Payload{}, opts...)
}

// Decode decodes the payload of an event of this type. It may block until ctx ends if the codec
// does I/O.
func (t Type[T]) Decode(ctx context.Context, payload []byte) (T, error) {
	var decoded T
	if err := codecOrJSON(t.Codec).Decode(ctx, payload, &decoded); err != nil {
		var none T
		return none, fmt.Errorf("decoding the payload of %s: %w", t.Name, err)
	}
	return decoded, nil
}

func codecOrJSON(chosen codec.Codec) codec.Codec {
	if chosen == nil {
		return codec.JSON()
	}
	return chosen
}
