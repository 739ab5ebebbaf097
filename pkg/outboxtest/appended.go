package outboxtest

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/contract/envelope"
	"github.com/outrelay/outrelay/internal/service/boxparts"
	"github.com/outrelay/outrelay/pkg/event"
	"github.com/outrelay/outrelay/pkg/outbox"
)

// Appended is an event that was found in an outbox, with its payload decoded.
type Appended[T any] struct {
	ID        event.ID
	Aggregate event.Aggregate
	Key       string // the ordering key
	Topic     string // empty if the relay chooses it
	Headers   []event.Header
	DueAt     time.Time // zero unless the event is scheduled
	ExpiresAt time.Time // zero if the event never expires
	Payload   T         // the zero value for a tombstone
}

// Match narrows a search. All of them must match.
type Match func(e *storedEvent) bool

// WithAggregateID finds only events about the aggregate with this id.
func WithAggregateID(id string) Match { return func(e *storedEvent) bool { return e.about.ID == id } }

// WithKey finds only events with this ordering key.
func WithKey(key string) Match { return func(e *storedEvent) bool { return e.key == key } }

// RequireAppended fails the test unless exactly one event of type t is in the outbox, and returns it. The outbox may be of an
// Env, or of a real database. It has events of committed transactions, also after they were published. A scheduled event is
// removed when it is published.
func RequireAppended[T any](tb testing.TB, box *outbox.Box, t event.Type[T], matches ...Match) Appended[T] {
	tb.Helper()
	all := readEvents(tb, box)
	found := selectEvents(all, t.Aggregate, t.Name, matches)
	if len(found) != 1 {
		tb.Fatalf("%d events %s of aggregate %s match, want 1\n%s", len(found), t.Name, t.Aggregate, describeEvents(all))
	}
	return decodeEvent(tb, found[0], t)
}

// RequireNone fails the test if events of type t are in the outbox.
func RequireNone[T any](tb testing.TB, box *outbox.Box, t event.Type[T], matches ...Match) {
	tb.Helper()
	all := readEvents(tb, box)
	if found := selectEvents(all, t.Aggregate, t.Name, matches); len(found) > 0 {
		tb.Fatalf("%d events %s of aggregate %s match, want none\n%s", len(found), t.Name, t.Aggregate, describeEvents(all))
	}
}

// AllAppended returns the events of type t in the outbox, in the order in which they were appended.
func AllAppended[T any](tb testing.TB, box *outbox.Box, t event.Type[T], matches ...Match) []Appended[T] {
	tb.Helper()
	var list []Appended[T]
	for _, e := range selectEvents(readEvents(tb, box), t.Aggregate, t.Name, matches) {
		list = append(list, decodeEvent(tb, e, t))
	}
	return list
}

// storedEvent is an event that was read from an outbox.
type storedEvent struct {
	id               event.ID
	about            event.Aggregate
	name, key, topic string
	headers          []event.Header
	dueAt, expiresAt time.Time
	payload          []byte // nil for a tombstone
}

// readEvents returns all events of an outbox.
func readEvents(tb testing.TB, box *outbox.Box) []*storedEvent {
	tb.Helper()
	docs, err := box.Parts(boxparts.Key{}).Store.Stored(tb.Context())
	if err != nil {
		tb.Fatal(err)
	}

	list := make([]*storedEvent, len(docs))
	for i, doc := range docs {
		if list[i], err = readEvent(doc); err != nil {
			tb.Fatalf("reading a stored event: %v", err)
		}
	}
	return list
}

// readEvent returns the event of an envelope.
func readEvent(doc bson.Raw) (*storedEvent, error) {
	var v envelope.View
	if err := envelope.Parse(doc, &v); err != nil {
		return nil, err
	}

	e := &storedEvent{
		about: event.Aggregate{Type: string(v.AggregateType), ID: string(v.AggregateID)},
		name:  string(v.Type), key: string(v.OrderingKey()), topic: string(v.Topic),
	}
	if err := doc.Lookup("_id").Unmarshal(&e.id); err != nil {
		return nil, err
	}
	// The slices of the view alias the document.
	for it := v.Headers.Iter(); it.Next(); {
		e.headers = append(e.headers, event.Header{Key: string(it.Key), Value: slices.Clone(it.Value)})
	}
	if v.HasDueAt {
		e.dueAt = time.UnixMilli(v.DueAt).UTC()
	}
	if v.HasExpiresAt {
		e.expiresAt = time.UnixMilli(v.ExpiresAt).UTC()
	}
	if v.Tombstone() {
		return e, nil
	}

	var err error
	// An empty payload is not nil, which would be a tombstone.
	e.payload, err = envelope.AppendPayload([]byte{}, &v)
	return e, err
}

// selectEvents returns the events of a type that match.
func selectEvents(all []*storedEvent, aggregate, name string, matches []Match) []*storedEvent {
	var found []*storedEvent
	for _, e := range all {
		isWrong := func(m Match) bool { return !m(e) }
		if e.about.Type == aggregate && e.name == name && !slices.ContainsFunc(matches, isWrong) {
			found = append(found, e)
		}
	}
	return found
}

// decodeEvent returns the event with its payload.
func decodeEvent[T any](tb testing.TB, e *storedEvent, t event.Type[T]) Appended[T] {
	tb.Helper()
	a := Appended[T]{
		ID: e.id, Aggregate: e.about, Key: e.key, Topic: e.topic, Headers: e.headers, DueAt: e.dueAt, ExpiresAt: e.expiresAt,
	}
	if e.payload == nil {
		return a
	}

	var err error
	if a.Payload, err = t.Decode(tb.Context(), e.payload); err != nil {
		tb.Fatalf("event %s about %s %s: %v", e.id, e.about.Type, e.about.ID, err)
	}
	return a
}

const (
	maxDescribed = 50  // events in a failure
	maxPayload   = 200 // bytes of a payload in a failure
)

// describeEvents lists the events of an outbox for a failure.
func describeEvents(all []*storedEvent) string {
	if len(all) == 0 {
		return "the outbox is empty"
	}

	var b strings.Builder
	b.WriteString("the outbox contains:")
	for i, e := range all {
		if i == maxDescribed {
			fmt.Fprintf(&b, "\n  … and %d more", len(all)-i)
			break
		}
		fmt.Fprintf(&b, "\n  %s about %s %s", e.name, e.about.Type, e.about.ID)
		if e.key != e.about.ID {
			fmt.Fprintf(&b, ", key %s", e.key)
		}
		if !e.dueAt.IsZero() {
			fmt.Fprintf(&b, ", due at %s", e.dueAt.Format(time.RFC3339))
		}
		switch {
		case e.payload == nil:
			b.WriteString(": tombstone")
		case len(e.payload) > maxPayload:
			fmt.Fprintf(&b, ": %s… (%d bytes)", e.payload[:maxPayload], len(e.payload))
		default:
			fmt.Fprintf(&b, ": %s", e.payload)
		}
	}
	return b.String()
}
