package outboxtest

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/base/module"
	"github.com/outrelay/outrelay/internal/contract/envelope"
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
func WithAggregateID(id string) Match {
	return func(event *storedEvent) bool { return event.about.ID == id }
}

// WithKey finds only events with this ordering key.
func WithKey(key string) Match { return func(event *storedEvent) bool { return event.key == key } }

// RequireAppended fails the test unless exactly one event of type eventType is in the outbox, and returns it. The outbox may be of an
// Env, or of a real database. It has events of committed transactions, also after they were published. A scheduled event is
// removed when it is published.
func RequireAppended[T any](tb testing.TB, box *outbox.Box, eventType event.Type[T], matches ...Match) Appended[T] {
	tb.Helper()
	all := readEvents(tb, box)
	found := selectEvents(all, eventType.Aggregate, eventType.Name, matches)
	if len(found) != 1 {
		tb.Fatalf("%d events %s of aggregate %s match, want 1\n%s", len(found), eventType.Name, eventType.Aggregate, describeEvents(all))
	}
	return decodeEvent(tb, found[0], eventType)
}

// RequireNone fails the test if events of type eventType are in the outbox.
func RequireNone[T any](tb testing.TB, box *outbox.Box, eventType event.Type[T], matches ...Match) {
	tb.Helper()
	all := readEvents(tb, box)
	if found := selectEvents(all, eventType.Aggregate, eventType.Name, matches); len(found) > 0 {
		tb.Fatalf("%d events %s of aggregate %s match, want none\n%s", len(found), eventType.Name, eventType.Aggregate, describeEvents(all))
	}
}

// AllAppended returns the events of type eventType in the outbox, in the order in which they were appended.
func AllAppended[T any](tb testing.TB, box *outbox.Box, eventType event.Type[T], matches ...Match) []Appended[T] {
	tb.Helper()
	var list []Appended[T]
	for _, e := range selectEvents(readEvents(tb, box), eventType.Aggregate, eventType.Name, matches) {
		list = append(list, decodeEvent(tb, e, eventType))
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
	docs, err := box.Parts(module.Key{}).Store.Stored(tb.Context())
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
	var view envelope.View
	if err := envelope.Parse(doc, &view); err != nil {
		return nil, err
	}

	storedEvent := &storedEvent{
		about: event.Aggregate{Type: string(view.AggregateType), ID: string(view.AggregateID)},
		name:  string(view.Type), key: string(view.OrderingKey()), topic: string(view.Topic),
	}
	if err := doc.Lookup("_id").Unmarshal(&storedEvent.id); err != nil {
		return nil, err
	}
	// The slices of the view alias the document.
	for it := view.Headers.Iter(); it.Next(); {
		storedEvent.headers = append(storedEvent.headers, event.Header{Key: string(it.Key), Value: slices.Clone(it.Value)})
	}
	if view.HasDueAt {
		storedEvent.dueAt = time.UnixMilli(view.DueAt).UTC()
	}
	if view.HasExpiresAt {
		storedEvent.expiresAt = time.UnixMilli(view.ExpiresAt).UTC()
	}
	if view.Tombstone() {
		return storedEvent, nil
	}

	var err error
	// An empty payload is not nil, which would be a tombstone.
	storedEvent.payload, err = envelope.AppendPayload([]byte{}, &view)
	return storedEvent, err
}

// selectEvents returns the events of a type that match.
func selectEvents(all []*storedEvent, aggregate, name string, matches []Match) []*storedEvent {
	var found []*storedEvent
	for _, e := range all {
		isWrong := func(match Match) bool { return !match(e) }
		if e.about.Type == aggregate && e.name == name && !slices.ContainsFunc(matches, isWrong) {
			found = append(found, e)
		}
	}
	return found
}

// decodeEvent returns the event with its payload.
func decodeEvent[T any](tb testing.TB, event *storedEvent, eventType event.Type[T]) Appended[T] {
	tb.Helper()
	appended := Appended[T]{
		ID: event.id, Aggregate: event.about, Key: event.key, Topic: event.topic, Headers: event.headers, DueAt: event.dueAt, ExpiresAt: event.expiresAt,
	}
	if event.payload == nil {
		return appended
	}

	var err error
	if appended.Payload, err = eventType.Decode(tb.Context(), event.payload); err != nil {
		tb.Fatalf("event %s about %s %s: %v", event.id, event.about.Type, event.about.ID, err)
	}
	return appended
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

	var builder strings.Builder
	builder.WriteString("the outbox contains:")
	for i, e := range all {
		if i == maxDescribed {
			fmt.Fprintf(&builder, "\n  … and %d more", len(all)-i)
			break
		}
		fmt.Fprintf(&builder, "\n  %s about %s %s", e.name, e.about.Type, e.about.ID)
		if e.key != e.about.ID {
			fmt.Fprintf(&builder, ", key %s", e.key)
		}
		if !e.dueAt.IsZero() {
			fmt.Fprintf(&builder, ", due at %s", e.dueAt.Format(time.RFC3339))
		}
		switch {
		case e.payload == nil:
			builder.WriteString(": tombstone")
		case len(e.payload) > maxPayload:
			fmt.Fprintf(&builder, ": %s… (%d bytes)", e.payload[:maxPayload], len(e.payload))
		default:
			fmt.Fprintf(&builder, ": %s", e.payload)
		}
	}
	return builder.String()
}
