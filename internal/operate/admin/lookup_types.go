package admin

import (
	"cmp"
	"fmt"
	"strings"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/relay/stored/outboxes"
)

// LookupQuery selects an event by its id, or the events of an ordering key. One of Text, ID and Key must
// be set.
type LookupQuery struct {
	Text       string    `query:"q" maxLength:"4096" doc:"An id, or the ordering key if no event has it as its id."`
	ID         string    `query:"id" maxLength:"4096" doc:"Only an id."`
	Key        string    `query:"key" maxLength:"4096" doc:"Only an ordering key."`
	Collection string    `query:"collection" maxLength:"255" doc:"Only this outbox, as database.collection."`
	From       time.Time `query:"from" doc:"For a key: written at this time or later. Default: an hour ago."`
	To         time.Time `query:"to" doc:"For a key: written before this time."`
	Limit      int       `query:"limit" minimum:"1" maximum:"1000" default:"100" doc:"For a key: bounds both the envelopes and the dead letters."`
}

// LookupResult is the result of a [LookupQuery].
type LookupResult struct {
	ByKey     bool            `json:"by_key"`    // the text was looked up as an ordering key
	Envelopes []FoundEnvelope `json:"envelopes"` // newest first; also of events of which only a dead letter or a handler knows
	Letters   []DeadLetter    `json:"letters"`   // of the relay and of handlers, newest first, without their envelopes
	Since     *time.Time      `json:"since,omitempty"`
	More      bool            `json:"more"`               // the result exceeds the limit
	Limits    string          `json:"limits,omitempty"`   // what the result cannot contain, in a sentence
	Canceled  *Cancellation   `json:"canceled,omitempty"` // of an event of which nothing else is stored
	Pause     string          `json:"pause,omitempty"`    // why events wait, in a sentence, if an operator has paused the watcher or no process sends
	Searched  []string        `json:"searched"`           // the outboxes that were searched, at most 20
	Outboxes  int             `json:"outboxes"`           // how many were searched
}

// FoundEnvelope is an event without its payload, and its whole life.
type FoundEnvelope struct {
	Collection    string `json:"collection"` // "" if only a handler knows the event
	ID            string `json:"id"`
	Type          string `json:"type"`
	AggregateType string `json:"aggregate_type"`
	AggregateID   string `json:"aggregate_id"`
	Key           string `json:"key"`
	Topic         string `json:"topic,omitempty"`          // the topic that the envelope itself names
	CorrelationID string `json:"correlation_id,omitempty"` // of its conversation; missing if its headers have none
	CausationID   string `json:"causation_id,omitempty"`   // id of the message whose handler appended it
	// State is appended, scheduled, waiting, dead or delivered. An appended event is too young to decide whether it is delivered.
	State    string           `json:"state"`
	Reason   string           `json:"reason,omitempty"` // why it waits
	Delivery int32            `json:"delivery"`
	Origin   string           `json:"origin,omitempty"` // of a waiting envelope
	ReplayOf string           `json:"replay_of,omitempty"`
	Waits    []string         `json:"waits"` // topics that do not have it yet
	Attempts int32            `json:"attempts"`
	Written  *time.Time       `json:"written,omitempty"` // by its timestamp, to the second, or by its id or the stream; missing if none has its time
	DueAt    *time.Time       `json:"due_at,omitempty"`
	NextAt   *time.Time       `json:"next_at,omitempty"`
	SentAt   *time.Time       `json:"sent_at,omitempty"` // set if deliveries are recorded on envelopes
	Sent     []outboxes.Place `json:"sent"`              // known places of its records in Kafka
	Handlers []FoundHandler   `json:"handlers"`          // the handlers that store something about the event
	Timeline []TimelineEntry  `json:"timeline"`          // in the order of time

	stamp     bson.Timestamp               // of the insert, or of the purge if the insert had none
	committed *time.Time                   // by the stream; nil if it is unknown
	reached   map[outboxes.Place]time.Time // when a handler had the record at this place
	causeRead bool                         // the headers of the event were read; only a mark may be left of it
}

// ConversationID returns the id of the conversation of the event, or "" if its headers are not stored any more. An event without a
// correlation id may begin a conversation, with its own id.
func (e FoundEnvelope) ConversationID() string {
	if e.CorrelationID == "" && e.causeRead {
		return e.ID
	}
	return e.CorrelationID
}

// setCause sets the cause that the headers of the event have.
func (e *FoundEnvelope) setCause(correlation, causation string) {
	e.CorrelationID, e.CausationID = cmp.Or(e.CorrelationID, correlation), cmp.Or(e.CausationID, causation)
	e.causeRead = true
}

// Cancellation is an action of an operator that canceled scheduled events.
type Cancellation struct {
	At    time.Time `json:"at"`
	Actor string    `json:"actor"`
}

// maxSearched bounds the names of outboxes in a result.
const maxSearched = 20

// DescribeMissing returns the sentences for a result without events. An event may also be in a collection that the watcher does not read.
func (r LookupResult) DescribeMissing() string {
	if r.Canceled != nil {
		return "The event is not stored any more: " + r.Canceled.Actor + " canceled it at " + r.Canceled.At.Format(time.RFC3339) + ", before it was due."
	}
	text := "Nothing was found: the event was never appended, its service has canceled it, or retention has removed it."
	if r.Outboxes == 0 {
		text += " The watcher has registered no outbox yet."
	} else {
		text += " Searched: " + strings.Join(r.Searched, ", ")
		if more := r.Outboxes - len(r.Searched); more > 0 {
			text += fmt.Sprintf(" and %d more outboxes", more)
		}
		text += "."
	}
	text += " An outbox that no watcher reads is not searched: outrelay doctor names such collections."
	if r.Since != nil {
		text += " For a key, delivered events are included since " + r.Since.UTC().Format(time.RFC3339) + "."
	}
	return text
}

// FoundHandler is the state of an event at a handler.
type FoundHandler struct {
	Group   string    `json:"group"`
	Handler string    `json:"handler"`
	State   string    `json:"state"` // handled, claimed, retried, dead, requeued or discarded
	At      time.Time `json:"at"`
	Place   string    `json:"place,omitempty"` // topic/partition@offset
	Reason  string    `json:"reason,omitempty"`
}

// Name returns the handler with its group.
func (h FoundHandler) Name() string { return NameHandler(h.Group, h.Handler) }

// NameHandler returns a handler with its group. A message that no handler takes has no handler.
func NameHandler(group, handler string) string {
	return cmp.Or(handler, "no handler") + " of group " + group
}

// The entries of a timeline.
const (
	eventAppended  = "appended"
	eventDue       = "due"
	eventSent      = "sent"
	eventFailed    = "failed"
	eventDead      = "dead"
	eventRequeued  = "requeued"
	eventDiscarded = "discarded"
	eventAside     = "set aside"
	eventHandled   = "handled"
	eventClaimed   = "claimed"
)

// TimelineEntry is one entry in the life of an event.
type TimelineEntry struct {
	At   time.Time `json:"at"`
	What string    `json:"what"` // appended, due, sent, failed, dead, requeued, discarded, set aside, handled, claimed
	Text string    `json:"text,omitempty"`
	Node string    `json:"node,omitempty"`
	// Letter is the id of the dead letter of the entries dead, requeued and discarded.
	Letter string `json:"letter,omitempty"`
}
