package saga

import (
	"encoding/json"
	"errors"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/pkg/consumer"
)

// HeaderID is the header with the text of the saga's id. Every event that a step of an existing saga emits has it, and a
// service that answers such an event should hand it on.
const HeaderID = "saga-id"

// Correlate says which saga a message is for. When it returns ErrNoSagaID, wrapped or not, the nil UUID or the empty
// string, the header saga-id decides.
type Correlate[I Identifier] func(m *consumer.Message) (I, error)

// ByHeader leaves it to the header saga-id.
func ByHeader[I Identifier]() Correlate[I] {
	return func(*consumer.Message) (I, error) { return *new(I), ErrNoSagaID }
}

// ByKey reads the message's key as the text of the id.
func ByKey[I Identifier]() Correlate[I] {
	return func(m *consumer.Message) (I, error) { return byText[I](string(m.Key)) }
}

// ByAggregate reads the id of the aggregate that the event is about as the text of the id.
func ByAggregate[I Identifier]() Correlate[I] {
	return func(m *consumer.Message) (I, error) { return byText[I](m.AggregateID) }
}

func byText[I Identifier](text string) (I, error) {
	if text == "" {
		return *new(I), ErrNoSagaID
	}
	return parseID[I](text)
}

// ByJSON decodes the message's value as JSON and asks f.
func ByJSON[P any, I Identifier](f func(P) I) Correlate[I] { return ByPayload(json.Unmarshal, f) }

// ByExtJSON is ByJSON for what the outbox makes of a payload that was appended as a document: relaxed Extended JSON.
func ByExtJSON[P any, I Identifier](f func(P) I) Correlate[I] { return ByPayload(unmarshalExtJSON, f) }

// ByPayload decodes the message's value and asks f. A value that cannot be decoded is a *PayloadError.
func ByPayload[P any, I Identifier](decode Decode, f func(P) I) Correlate[I] {
	return func(m *consumer.Message) (I, error) {
		p, err := payload[P](decode, m)
		if err != nil {
			return *new(I), err
		}
		return f(p), nil
	}
}

// Decode reads bytes into a pointer, as json.Unmarshal does.
type Decode func(data []byte, into any) error

func unmarshalExtJSON(data []byte, into any) error { return bson.UnmarshalExtJSON(data, false, into) }

var errTombstone = errors.New("the record is a tombstone: it has no value")

func payload[P any](decode Decode, m *consumer.Message) (P, error) {
	var p P
	err := errTombstone
	if !m.Tombstone() {
		err = decode(m.Value, &p)
	}
	if err != nil {
		return p, &PayloadError{Type: m.Type, Message: m.ID, Err: err}
	}
	return p, nil
}
