package consumer

import (
	"bytes"
	"slices"
	"time"

	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/service/transport"
	"github.com/outrelay/outrelay/pkg/event"
)

// Message is one record as handlers and middleware get it. They may change the message or pass on
// another one, because each handler gets its own copy for each attempt. The copies share the bytes
// of Key, Value and the header values: replace these slices instead of writing into them.
type Message struct {
	Topic       string
	Partition   int32
	Offset      int64
	LeaderEpoch int32 // of the partition leader that wrote it; -1 unknown
	Time        time.Time
	Key, Value  []byte         // Value nil: a tombstone
	Headers     []event.Header // all headers of the record, unchanged

	// ID is the text of the event's id. For a record without an id it is
	// "<topic>/<partition>/<offset>@<timestamp in ms>", which is the same in each redelivery.
	ID string
	// Source distinguishes equal ids of different origins. It is the header outrelay-ns in
	// hexadecimal; without that header, the source of a CloudEvent; otherwise "", and the topic of the
	// first record distinguishes them.
	Source string
	// Name is the event's type; "" if the record has none.
	Name string
	// Aggregate, ContentType and SchemaVersion are set if the relay's preset writes them. Without an aggregate, its ID is the key.
	Aggregate                  event.Aggregate
	ContentType, SchemaVersion string

	Delivery    int  // incremented by each requeue or replay of the outbox
	Redelivered bool // set by the relay if the event may have been delivered before

	// Attempt starts at 1 and continues to count through retry topics and requeues.
	Attempt int
	// Group is the consumer group that handles the message.
	Group string
}

// Tombstone reports whether the record has no value, which deletes its key from a compacted topic.
// A message with an empty value is not a tombstone.
func (m *Message) Tombstone() bool { return m.Value == nil }

// Header returns the value of the first header of that name, and reports whether there is one.
func (m *Message) Header(name string) ([]byte, bool) {
	for i := range m.Headers {
		if m.Headers[i].Key == name {
			return m.Headers[i].Value, true
		}
	}
	return nil, false
}

// Cause returns the cause of the events that a handler of m appends: the conversation that m belongs to, or begins, and the id of
// m. The context of a handler has it already. A handler of batches has only the parts that all messages of the batch share. To
// give each event the cause of its message, it appends with event.ContextWithCause(ctx, m.Cause()).
func (m *Message) Cause() event.Cause {
	cause := event.Cause{CorrelationID: m.ID, CausationID: m.ID}
	for _, name := range []string{record.HeaderCorrelationID, record.HeaderCECorrelationID} {
		if id, ok := m.Header(name); ok && len(id) > 0 {
			cause.CorrelationID = string(id)
			break
		}
	}
	return cause
}

// causeOfBatch returns the parts of the cause that all messages share.
func causeOfBatch(messages []*Message) event.Cause {
	shared := messages[0].Cause()
	for _, message := range messages[1:] {
		cause := message.Cause()
		if cause.CorrelationID != shared.CorrelationID {
			shared.CorrelationID = ""
		}
		if cause.CausationID != shared.CausationID {
			shared.CausationID = ""
		}
	}
	return shared
}

// SetHeader replaces all headers of that name by one. It copies the list, so copies of the message
// do not change.
func (m *Message) SetHeader(name string, value []byte) {
	hs := make([]event.Header, 0, len(m.Headers)+1)
	for _, h := range m.Headers {
		if h.Key != name {
			hs = append(hs, h)
		}
	}
	m.Headers = append(hs, event.Header{Key: name, Value: value})
}

// DeleteHeader removes all headers of that name. It copies the list, so copies of the message do
// not change.
func (m *Message) DeleteHeader(name string) {
	m.Headers = slices.DeleteFunc(slices.Clone(m.Headers), func(header event.Header) bool { return header.Key == name })
}

// Clone returns a copy that shares nothing.
func (m *Message) Clone() *Message {
	message := m.copy()
	message.Key, message.Value = bytes.Clone(m.Key), bytes.Clone(m.Value)
	for i := range message.Headers {
		message.Headers[i].Value = bytes.Clone(message.Headers[i].Value)
	}
	return message
}

// copy returns a copy that shares the bytes of key, value and header values, but not the list of headers.
func (m *Message) copy() *Message {
	message := *m
	message.Headers = slices.Clone(m.Headers)
	return &message
}

// recordOf returns message as a record for a Publisher.
func recordOf(message *Message) transport.Record {
	return transport.Record{Offset: message.Offset, Key: message.Key, Value: message.Value, Headers: message.Headers}
}
