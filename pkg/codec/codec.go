// Package codec converts Go values to the bytes of payloads and back.
//
// A codec is a part of an event.Type, so the producer and the consumers of a type use the same one.
// JSON is the default. Raw passes bytes through, and ExtJSON reads payloads that are stored as BSON
// documents. The Protobuf codec is in package codec/protobuf, so services without Protobuf do not
// link its library.
package codec

import (
	"context"
	"errors"
)

// Codec encodes and decodes payloads. It must be safe for concurrent use. To support another
// format, implement it.
type Codec interface {
	// ContentType returns the media type of the payloads, for example "application/json".
	ContentType() string

	// Encode returns the payload of v. It must not do I/O, because it runs inside of the caller's
	// transaction. The result must not share memory with v.
	Encode(v any) ([]byte, error)

	// Decode reads data into the value that into points to. It may do I/O until ctx ends, for
	// example to look up a schema. An error that wraps ErrUnavailable means that a later attempt
	// may succeed. Any other error means that data can never be decoded.
	Decode(ctx context.Context, data []byte, into any) error
}

// ErrUnavailable means that a codec needs something that it cannot reach now, such as a schema
// registry. A payload that fails to decode for this reason is not invalid: decode it again later.
var ErrUnavailable = errors.New("codec: a dependency is unavailable")
