package deadletter

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/pkg/event"
)

// ID identifies a letter by the place of the message's first record, before retry topics: a message with the id of another one
// has a letter of its own. If a message fails again in the same delivery, for example after a crash, it has the same letter.
type ID struct {
	Group     string `bson:"group" json:"group"`
	Handler   string `bson:"handler" json:"handler"` // "" if no handler took the message, or if it could not be decoded
	Topic     string `bson:"topic" json:"topic"`
	Partition int32  `bson:"partition" json:"partition"`
	Offset    int64  `bson:"offset" json:"offset"`
	// Source and Message are of the message, and distinguish it from the record at the same place of a topic that was created again.
	Source   string `bson:"source" json:"source"`
	Message  string `bson:"message" json:"message"`
	Delivery int    `bson:"delivery" json:"delivery"`
}

// String returns the id as text for logs.
func (id ID) String() string {
	return fmt.Sprintf("%s/%s/%s/%s/%s/%d", id.Group, id.Handler, id.Place(), id.Source, id.Message, id.Delivery)
}

// Place returns the place of the message's first record: "<topic>/<partition>@<offset>".
func (id ID) Place() string { return record.FormatPlace(id.Topic, id.Partition, id.Offset) }

// Letter is a message that was given up, with its whole record.
type Letter struct {
	ID     ID     `bson:"_id"`
	Class  string `bson:"class"`
	Reason string `bson:"reason"` // at most 8 KiB

	// Name, Aggregate, ContentType and SchemaVersion were decoded from the record.
	Name          string          `bson:"name,omitempty"`
	Aggregate     event.Aggregate `bson:"aggregate"`
	ContentType   string          `bson:"contentType,omitempty"`
	SchemaVersion string          `bson:"schemaVersion,omitempty"`

	Time time.Time `bson:"time"` // of the record

	Key     []byte         `bson:"key"`   // nil: null
	Value   []byte         `bson:"value"` // nil: a tombstone, or left out because Size is more than 12 MiB
	Headers []event.Header `bson:"headers"`
	Size    int            `bson:"size"` // of the value, in bytes

	Attempts  int       `bson:"attempts"`
	History   []Failure `bson:"history"`            // the latest 20
	GivenUpAt time.Time `bson:"givenUpAt"`          // by the clock of the database
	Requeued  *Requeued `bson:"requeued,omitempty"` // nil if the letter was not requeued

	Archived *Archived  `bson:"archived,omitempty"` // nil if the letter was not discarded
	ExpireAt *time.Time `bson:"expireAt,omitempty"` // when the letter leaves the archive; nil outside of it
}

// Archived describes the discard of a letter that is in the archive.
type Archived struct {
	At    time.Time `bson:"at"` // by the clock of the database
	Actor string    `bson:"actor"`
}

// Failure is a failed attempt.
type Failure struct {
	At      time.Time `bson:"at" json:"at"`
	Attempt int       `bson:"attempt" json:"attempt"`
	Class   string    `bson:"class" json:"class"`
	Reason  string    `bson:"reason" json:"reason"` // at most 512 bytes
}

// Requeued describes the requeue of a letter.
type Requeued struct {
	At       time.Time `bson:"at"` // by the clock of the database
	Actor    string    `bson:"actor"`
	Note     string    `bson:"note,omitempty"`
	Handlers []string  `bson:"handlers"` // the handlers that get the message

	// Waiting reports whether a handler has not finished the message: it has not taken it yet, fails, or does not run.
	// Otherwise the message was handled, or given up again with the next Delivery.
	Waiting bool `bson:"-"`
}

// The values of Letter.Class. Later versions may add more.
const (
	ClassHandler   = "handler"   // the handler returned errors for too long
	ClassRejected  = "rejected"  // consumer.Reject
	ClassTimeout   = "timeout"   // the last attempt timed out
	ClassPanic     = "panic"     // the last attempt panicked
	ClassMalformed = "malformed" // consumer.ErrMalformed: the record or its payload could not be decoded
	ClassExpired   = "expired"   // the deadline of the message had passed
	ClassUnknown   = "unknown"   // no handler takes the message, or its handler is gone
	ClassSkipped   = "skipped"   // an operator has discarded the message while it waited for a retry
	ClassDatabase  = "database"  // the database was unavailable for too long, with consumer.WithRetryFor
)

// Summary counts letters with the same failure: handler, topic, event name, class, and message without variable parts.
type Summary struct {
	Group   string `bson:"group"`
	Handler string `bson:"handler"`
	Topic   string `bson:"topic"`
	Name    string `bson:"name"`
	Class   string `bson:"class"`
	// Failure is the reason without its variable parts: numbers, ids and quoted texts.
	Failure     string    `bson:"failure"`
	Fingerprint string    `bson:"fingerprint"` // for Query.Fingerprint
	Count       int64     `bson:"count"`
	Requeued    int64     `bson:"requeued"` // the part of Count that was requeued
	First       time.Time `bson:"first"`    // when the first of them was given up
	Last        time.Time `bson:"last"`
}

// omitContent removes everything that can make the letter impossible to write, or that a redaction must see.
func (l *Letter) omitContent(cause error) {
	l.Key, l.Value, l.Headers, l.History = nil, nil, nil, nil
	l.Name = strings.ToValidUTF8(l.Name[:min(len(l.Name), 512)], "\uFFFD")
	l.Aggregate, l.ContentType, l.SchemaVersion = event.Aggregate{}, "", ""
	l.Reason = fmt.Sprintf("the content was left out: %v; the record is at %s", cause, l.ID.Place())
}

// isBare reports whether the letter has nothing of its record: the record could not be read, or omitContent has removed it. A
// tombstone has a key or headers of its producer.
func (l *Letter) isBare() bool {
	hasOther := func(header event.Header) bool { return header.Key != record.HeaderID }
	return l.Key == nil && l.Value == nil && l.countChunks() == 0 && !slices.ContainsFunc(l.Headers, hasOther)
}

// letterPlace is the place of a letter in a list.
type letterPlace struct {
	ID ID        `bson:"id"`
	At time.Time `bson:"at"`
}

// Cursor returns the place of the letter in a list, for Query.After.
func (l *Letter) Cursor() string {
	place, _ := bson.MarshalExtJSON(letterPlace{l.ID, l.GivenUpAt}, false, false)
	return string(place)
}

var errCursor = errors.New("deadletter: invalid Query.After; pass the result of Letter.Cursor")

// parseCursor returns a letter with the place of a Cursor, or nil for "".
func parseCursor(text string) (*Letter, error) {
	if text == "" {
		return nil, nil
	}
	var place letterPlace
	if err := bson.UnmarshalExtJSON([]byte(text), false, &place); err != nil || place.At.IsZero() {
		return nil, errCursor
	}
	return &Letter{ID: place.ID, GivenUpAt: place.At}, nil
}
