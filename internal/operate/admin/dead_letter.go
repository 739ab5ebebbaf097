package admin

import (
	"encoding/json"
	"slices"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/contract/envelope"
	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/relay/stored/letters"
	"github.com/outrelay/outrelay/internal/relay/stored/outboxes"
	"github.com/outrelay/outrelay/internal/relay/stored/requeues"
)

// DeadAttempt is one failed delivery of a [DeadLetter].
type DeadAttempt = record.Attempt

// DeadSource is who gave up the event of a [DeadLetter].
type DeadSource = letters.Source

// DeadLetter is a dead letter as the commands and the API show it.
type DeadLetter struct {
	Row           string           `json:"row"`              // names this letter alone; the actions take it as an id
	Letter        string           `json:"letter,omitempty"` // id of the letter; "" for a letter of a handler
	Collection    string           `json:"collection"`
	ID            string           `json:"id"`
	Delivery      int32            `json:"delivery"`
	Version       int32            `json:"version"` // an edit must name it
	AggregateType string           `json:"aggregate_type,omitempty"`
	AggregateID   string           `json:"aggregate_id,omitempty"`
	Type          string           `json:"type,omitempty"`
	Key           string           `json:"key,omitempty"`
	Topic         string           `json:"topic,omitempty"`
	Partition     *int32           `json:"partition,omitempty"`
	Place         string           `json:"place,omitempty"` // of a handler: topic/partition@offset of the first record
	Class         string           `json:"class"`
	Reason        string           `json:"reason"`
	Position      string           `json:"position,omitempty"`
	Size          int              `json:"size"` // bytes of the envelope
	Source        letters.Source   `json:"source"`
	Attempts      []record.Attempt `json:"attempts"`
	FirstFailure  time.Time        `json:"first_failure"`
	LastFailure   time.Time        `json:"last_failure"`
	DiedAt        time.Time        `json:"died_at"`
	ReplayOf      string           `json:"replay_of,omitempty"`
	Requeued      *letters.Requeue `json:"requeued,omitempty"`
	Waiting       bool             `json:"waiting,omitempty"`  // the handler has not finished the requeued message
	Archived      *DeadArchived    `json:"archived,omitempty"` // missing if it is not in the archive
	// Envelope is relaxed Extended JSON. Only a single letter has it.
	Envelope json.RawMessage `json:"envelope,omitempty"`

	origin letterOrigin
}

// DeadArchived states who discarded a letter, and when it leaves the archive.
type DeadArchived struct {
	At    time.Time `json:"at"`
	Actor string    `json:"actor"`
	Until time.Time `json:"until"`
}

// newDeadArchived returns the discard of a letter, or nil if it is not in the archive.
func newDeadArchived(archived *letters.Archived, expire *time.Time) *DeadArchived {
	if archived == nil || expire == nil {
		return nil
	}
	return &DeadArchived{archived.At.UTC(), archived.Actor, expire.UTC()}
}

// letterOrigin has the fields of a [DeadLetter] that only this package uses.
type letterOrigin struct {
	stamp  bson.Timestamp // of the insert of the envelope
	place  outboxes.Place // of a letter of a handler
	source string         // name of its letterSource
	cursor string         // of the page after the letter, in its source
}

// State returns the state of the letter: requeued, discarded or dead. A letter that was requeued may be discarded as well.
func (d DeadLetter) State() string {
	switch {
	case d.Requeued != nil:
		return eventRequeued
	case d.Archived != nil:
		return eventDiscarded
	}
	return eventDead
}

// newDeadLetter converts a stored letter, without its envelope.
func newDeadLetter(letter *letters.Dead) DeadLetter {
	return DeadLetter{
		Row:           letter.ID,
		Letter:        letter.ID,
		Collection:    letter.NS,
		ID:            letter.IDText(),
		Delivery:      letter.Delivery,
		Version:       letter.Version(),
		AggregateType: letter.AggregateType,
		Type:          letter.Type,
		Key:           letter.Key,
		Topic:         letter.Topic,
		Partition:     letter.Partition,
		Class:         string(letter.Class),
		Reason:        letter.Reason,
		Position:      letter.Pos,
		Size:          letter.Size,
		Source:        letter.Source,
		Attempts:      append([]record.Attempt{}, letter.Attempts...),
		FirstFailure:  letter.FirstFailure,
		LastFailure:   letter.LastFailure,
		DiedAt:        letter.MovedAt,
		ReplayOf:      letter.ReplayOf,
		Requeued:      letter.Requeued,
		Archived:      newDeadArchived(letter.Archived, letter.ExpireAt),
		origin:        letterOrigin{stamp: letter.Stamp},
	}
}

// shownFields are the fields of an envelope that contain no business data.
var shownFields = append(slices.DeleteFunc(requeues.Editable(), func(f string) bool { return f == "payload" }),
	"_id", "ts", "slot", "dueAt", "scheduledFor", "sentAt")

// isShown reports whether a field of a document contains no business data.
func isShown(name string, mapping *envelope.Mapping) bool {
	return slices.ContainsFunc(shownFields, func(field string) bool { return mapping.Name(field) == name })
}

// hiddenValue replaces a value that is not shown.
type hiddenValue struct {
	Hidden bool   `bson:"hidden"`
	Type   string `bson:"type"`
	Bytes  int    `bson:"bytes"`
}

// envelopeJSON returns the envelope as relaxed Extended JSON, or nil if it cannot be expressed as
// such. Unless all is true, it replaces the values of fields with business data.
func envelopeJSON(raw bson.Raw, all bool, mapping *envelope.Mapping) json.RawMessage {
	elems, err := raw.Elements()
	if err != nil {
		return nil
	}

	doc := make(bson.D, 0, len(elems))
	for _, e := range elems {
		var value any = e.Value()
		if !all && !isShown(e.Key(), mapping) && e.Value().Type != bson.TypeNull {
			value = hiddenValue{true, e.Value().Type.String(), valueSize(e.Value())}
		}
		doc = append(doc, bson.E{Key: e.Key(), Value: value})
	}

	out, err := bson.MarshalExtJSON(doc, false, false)
	if err != nil || !json.Valid(out) {
		return nil
	}
	return out
}

// valueSize returns the bytes of a value. For a string or a binary it does not count the framing.
func valueSize(value bson.RawValue) int {
	if text, ok := value.StringValueOK(); ok {
		return len(text)
	}
	if _, data, ok := value.BinaryOK(); ok {
		return len(data)
	}
	return len(value.Value)
}
