package operate

import (
	"context"
	"time"

	"github.com/outrelay/outrelay/internal/operate/admin"
)

// Found has everything that is stored about an id, or about the events of an ordering key.
type Found struct {
	ByKey   bool         // the text is an ordering key
	Events  []FoundEvent // newest first; also events of which only a dead letter or a handler has a trace
	Letters []Letter     // of the relay and of handlers, newest first, without their events
	More    bool         // there are more than 100 events or letters
	Limits  string       // the limits of the result, in a sentence; "" if it is complete
	Pause   string       // why events wait, in a sentence; "" if no operator has paused the watcher
}

// FoundEvent is an event without its payload, and its life.
type FoundEvent struct {
	Collection    string // the outbox, as database.collection; "" if only a handler has stored the event
	ID            string
	Type          string // name of the event
	AggregateType string
	AggregateID   string
	Key           string // the ordering key
	CorrelationID string // of its conversation; "" if its headers have none
	CausationID   string // of the message whose handler appended it, or ""

	// State is appended, scheduled, waiting, dead or delivered. An appended event is too young to decide whether it is delivered.
	State    string
	Reason   string // why it waits
	Handlers []HandlerState
	Life     []LifeEntry // in the order of time
}

// HandlerState is the state of an event at a handler.
type HandlerState struct {
	Group, Handler string
	State          string // handled, claimed, retried, dead, requeued or discarded
	At             time.Time
	Place          string // topic/partition@offset; "" if it is unknown
	Reason         string // of the last failure
}

// LifeEntry is an entry in the life of an event.
type LifeEntry struct {
	At    time.Time
	Entry string // appended, due, sent, failed, dead, requeued, discarded, set aside, handled or claimed
	Text  string // details, such as the places in Kafka
	Node  string // of the relay
}

// Lookup returns everything that is stored about an event with this id, or if there is none, about the events of this ordering key
// in the last hour. It costs a few index lookups for each outbox and each database of a service.
func (o *Operator) Lookup(ctx context.Context, idOrKey string) (Found, error) {
	const doing = "look up the event"
	use, err := o.prepare(ctx)
	if err != nil {
		return Found{}, explain(doing, err)
	}
	result, err := use.Lookup(ctx, admin.LookupQuery{Text: idOrKey})
	if err != nil {
		return Found{}, explain(doing, err)
	}

	found := Found{ByKey: result.ByKey, More: result.More, Limits: result.Limits, Pause: result.Pause}
	for i := range result.Envelopes {
		found.Events = append(found.Events, newFoundEvent(&result.Envelopes[i]))
	}

	for i := range result.Letters {
		found.Letters = append(found.Letters, newLetter(&result.Letters[i]))
	}
	return found, nil
}

func newFoundEvent(stored *admin.FoundEnvelope) FoundEvent {
	event := FoundEvent{
		Collection: stored.Collection, ID: stored.ID, Type: stored.Type, AggregateType: stored.AggregateType, AggregateID: stored.AggregateID,
		Key: stored.Key, CorrelationID: stored.CorrelationID, CausationID: stored.CausationID, State: stored.State, Reason: stored.Reason,
	}

	for _, handler := range stored.Handlers {
		event.Handlers = append(event.Handlers, HandlerState{
			Group: handler.Group, Handler: handler.Handler, State: handler.State, At: handler.At, Place: handler.Place, Reason: handler.Reason,
		})
	}
	for _, entry := range stored.Timeline {
		event.Life = append(event.Life, LifeEntry{At: entry.At, Entry: entry.What, Text: entry.Text, Node: entry.Node})
	}
	return event
}

// Conversation has the events that follow from one event.
type Conversation struct {
	Events []ConversationEvent // an event follows the event that caused it
	Since  time.Time           // events that were written before are not searched
	More   bool                // there are more events
	Limits string              // the limits of the result, in a sentence; "" if it is complete
}

// ConversationEvent is an event of a conversation, without its payload.
type ConversationEvent struct {
	Depth         int // 0: the cause is not among the events
	Collection    string
	ID            string
	Type          string
	AggregateType string
	AggregateID   string
	CausationID   string    // of the message whose handler appended it
	State         string    // as in [FoundEvent]
	Reason        string    // why it waits, or the class of its dead letter
	Written       time.Time // zero if unknown
	GivenUp       []Letter  // of handlers
}

// Conversation returns the events of the last 24 hours with a correlation id, and the first event, whose id is usually the same. It reads
// the time index of each outbox, the waiting events and the dead letters.
func (o *Operator) Conversation(ctx context.Context, correlationID string) (Conversation, error) {
	const doing = "look up the conversation"
	use, err := o.prepare(ctx)
	if err != nil {
		return Conversation{}, explain(doing, err)
	}
	stored, err := use.Conversation(ctx, admin.ConversationQuery{ID: correlationID})
	if err != nil {
		return Conversation{}, explain(doing, err)
	}

	found := Conversation{Since: stored.Since, More: stored.More, Limits: stored.Limits}
	for i := range stored.Events {
		event := &stored.Events[i]
		next := ConversationEvent{
			Depth: event.Depth, Collection: event.Collection, ID: event.ID, Type: event.Type, AggregateType: event.AggregateType,
			AggregateID: event.AggregateID, CausationID: event.CausationID, State: event.State, Reason: event.Reason, Written: timeOf(event.Written),
		}
		for k := range event.Handlers {
			next.GivenUp = append(next.GivenUp, newLetter(&event.Handlers[k]))
		}
		found.Events = append(found.Events, next)
	}
	return found, nil
}
