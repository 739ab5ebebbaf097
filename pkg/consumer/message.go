package consumer

import (
	"bytes"
	"errors"
	"slices"
	"time"
)

// Header is one header of a record. Names may repeat.
type Header struct {
	Key   string
	Value []byte
}

// Record is one record as a Transport brings it. Its bytes belong to whoever holds the record.
type Record struct {
	Topic       string
	Partition   int32
	Offset      int64
	LeaderEpoch int32 // under which it was written; -1 unknown
	Time        time.Time
	Key, Value  []byte // Value nil: a tombstone
	Headers     []Header
	// Err is why the record cannot be read, for example because it is too large. Then it has only its place and its time, and
	// becomes a dead letter.
	Err error
}

// Message is one record as handlers and middleware see it. They get it by pointer and may change it or hand on another
// one: each handler has a copy of its own for each attempt, whose bytes (Key, Value, the headers' values) are shared and
// must be replaced rather than written to.
type Message struct {
	Topic       string
	Partition   int32
	Offset      int64
	LeaderEpoch int32 // of the partition's leader that wrote it; -1 unknown
	Time        time.Time
	Key, Value  []byte   // Value nil: a tombstone
	Headers     []Header // all headers of the record, as they came

	// ID is the text of the event's id; without one "<topic>/<partition>/<offset>@<timestamp in ms>", which is the same at
	// each redelivery.
	ID string
	// Namespace tells the origins of equal ids apart: header outrelay-ns in hexadecimal, without it the source of a
	// CloudEvent, else "".
	Namespace string
	// Type is the event's type; "" if the record says none.
	Type string
	// AggregateType, AggregateID, ContentType and SchemaVersion are there where the relay's preset writes them.
	AggregateType, AggregateID, ContentType, SchemaVersion string

	Delivery    int  // +1 by each requeue or replay of the outbox
	Redelivered bool // the relay says that it may have been delivered before

	// Attempt is 1 at first and counts on through retry topics and redeliveries by the ladder.
	Attempt int
	// Group is the consumer group that handles it.
	Group string
}

// Tombstone reports whether the record has no value, which deletes its key from a compacted topic. An empty value is none.
func (m *Message) Tombstone() bool { return m.Value == nil }

// Header is the value of the first header of that name, and whether there is one.
func (m *Message) Header(name string) ([]byte, bool) {
	for i := range m.Headers {
		if m.Headers[i].Key == name {
			return m.Headers[i].Value, true
		}
	}
	return nil, false
}

// SetHeader replaces the headers of that name by one. The slice is copied: other holders of the old one see no change.
func (m *Message) SetHeader(name string, value []byte) {
	hs := make([]Header, 0, len(m.Headers)+1)
	for _, h := range m.Headers {
		if h.Key != name {
			hs = append(hs, h)
		}
	}
	m.Headers = append(hs, Header{Key: name, Value: value})
}

// DeleteHeader takes the headers of that name away, copying the slice.
func (m *Message) DeleteHeader(name string) {
	m.Headers = slices.DeleteFunc(slices.Clone(m.Headers), func(h Header) bool { return h.Key == name })
}

// Copy is a copy that shares the bytes of key, value and header values, but not the list of headers.
func (m *Message) Copy() *Message {
	c := *m
	c.Headers = slices.Clone(m.Headers)
	return &c
}

// Clone is a copy that shares nothing.
func (m *Message) Clone() *Message {
	c := m.Copy()
	c.Key, c.Value = bytes.Clone(m.Key), bytes.Clone(m.Value)
	for i := range c.Headers {
		c.Headers[i].Value = bytes.Clone(c.Headers[i].Value)
	}
	return c
}

// ErrDrop says, returned by a handler or a middleware, wrapped or not, that the message is done with: nothing more runs for
// this handler, what was written in the message's transaction is committed, it is counted as dropped, and its offset
// passes.
var ErrDrop = errors.New("consumer: the message is dropped")
