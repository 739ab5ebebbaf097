// Package event defines the events that a service appends to its outbox.
//
// Declare each type of event once, in a package that the producer and its consumers share:
//
//	type Placed struct {
//		Customer string `json:"customer"`
//		Cents    int64  `json:"cents"`
//	}
//
//	var OrderPlaced = event.Type[Placed]{Aggregate: "order", Name: "OrderPlaced"}
//
// The producer appends an event in the transaction of its business write:
//
//	err := box.Append(ctx, OrderPlaced.New(orderID, Placed{Customer: "c-7", Cents: 4200}))
//
// The relay publishes it to the topic outbox.event.order, unless it is configured otherwise, with
// the order's id as the key of the record. Events with the same key arrive in commit order.
//
// # Payloads
//
// A Type encodes its payload with its codec. Without one, it uses codec.JSON. If the type of an
// event is known only at run time, pass New a Payload: JSON, Encode with a codec, Bytes, or
// Document. The zero Payload is a tombstone.
//
//	                         content type        stored as           published as
//	JSON(v), Type.New        application/json    text                the same bytes
//	Encode(c, v)             that of the codec   text or binary      the same bytes
//	Bytes(contentType, b)    contentType         text or binary      the same bytes
//	Document(v)              none                BSON                relaxed Extended JSON
//	Payload{}, Tombstone     none                null                a null value
//
// Payloads with a content type of text or JSON are stored as text if they are valid UTF-8, so a
// person can read them in the collection.
//
// # Values
//
// An Event is an immutable value, and goroutines may share it. With returns a changed copy.
// Constructors and options do not fail: Validate, MarshalBSON and outbox.Box.Append report all
// mistakes of an event as one *InvalidError.
package event
