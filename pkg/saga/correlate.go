package saga

import (
	"encoding/json"
	"errors"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/pkg/consumer"
)

// HeaderID is the name of the header that contains the id of the saga as a text. Every event that a
// step of an existing saga emits has it. A service that answers such an event should copy the
// header to its answer.
const HeaderID = "saga-id"

// Correlate returns the id of the saga that a message is for. If it returns ErrNoSagaID (wrapped or
// not), the nil UUID or the empty string, the header saga-id is used.
type Correlate[I Identifier] func(m *consumer.Message) (I, error)

// ByHeader correlates messages by the header saga-id only.
func ByHeader[I Identifier]() Correlate[I] {
	return func(*consumer.Message) (I, error) { return *new(I), ErrNoSagaID }
}

// ByKey correlates messages by their key, which must be the text of the id.
func ByKey[I Identifier]() Correlate[I] {
	return func(m *consumer.Message) (I, error) { return idFromText[I](string(m.Key)) }
}

// ByAggregate correlates messages by their aggregate id, which must be the text of the id.
func ByAggregate[I Identifier]() Correlate[I] {
	return func(m *consumer.Message) (I, error) { return idFromText[I](m.Aggregate.ID) }
}

// idFromText parses an id. An empty text is ErrNoSagaID.
func idFromText[I Identifier](text string) (I, error) {
	if text == "" {
		return *new(I), ErrNoSagaID
	}
	return parseID[I](text)
}

// ByJSON correlates messages by the id that f returns for the value, decoded from JSON. A value
// that cannot be decoded is a *PayloadError.
func ByJSON[P any, I Identifier](f func(P) I) Correlate[I] { return ByPayload(json.Unmarshal, f) }

// ByExtJSON correlates messages by the id that f returns for the value, decoded from relaxed
// Extended JSON. The relay publishes a payload in this format if it was appended as a document. A
// value that cannot be decoded is a *PayloadError.
func ByExtJSON[P any, I Identifier](f func(P) I) Correlate[I] { return ByPayload(unmarshalExtJSON, f) }

// ByPayload correlates messages by the id that f returns for the value, decoded by decode. A value
// that cannot be decoded is a *PayloadError.
func ByPayload[P any, I Identifier](decode Decode, f func(P) I) Correlate[I] {
	return func(m *consumer.Message) (I, error) {
		p, err := decodePayload[P](decode, m)
		if err != nil {
			return *new(I), err
		}
		return f(p), nil
	}
}

// Decode decodes data into the value that the pointer into refers to, as json.Unmarshal does.
type Decode func(data []byte, into any) error

// unmarshalExtJSON decodes relaxed Extended JSON.
func unmarshalExtJSON(data []byte, into any) error { return bson.UnmarshalExtJSON(data, false, into) }

var errTombstone = errors.New("the record is a tombstone: it has no value")

// decodePayload decodes the value of m. The error is a *PayloadError.
func decodePayload[P any](decode Decode, m *consumer.Message) (P, error) {
	var p P
	err := errTombstone
	if !m.Tombstone() {
		err = decode(m.Value, &p)
	}
	if err != nil {
		return p, &PayloadError{Type: m.Name, Message: m.ID, Err: err}
	}
	return p, nil
}
