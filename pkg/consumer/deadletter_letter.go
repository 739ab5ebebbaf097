package consumer

import (
	"cmp"
	"fmt"
	"strconv"
	"time"

	"github.com/outrelay/outrelay/pkg/event"
)

// LetterID identifies a dead letter by group, handler, identity of the message, and delivery. Each requeue increments the
// delivery. If a message fails again in the same delivery, for example after a crash, it has the same letter.
type LetterID struct {
	Group    string `bson:"group"`
	Handler  string `bson:"handler"`
	NS       string `bson:"ns"`
	ID       string `bson:"id"`
	Delivery int    `bson:"delivery"`
}

// String returns the id as text for arguments and logs.
func (id LetterID) String() string {
	return fmt.Sprintf("%s/%s/%s/%s/%d", id.Group, id.Handler, id.NS, id.ID, id.Delivery)
}

// LetterHeader is a header of the record in the stored form.
type LetterHeader struct {
	Key   string `bson:"k"`
	Value []byte `bson:"v"` // nil: null
}

// Letter is a dead letter: the whole record of a message that was given up, and the reason.
type Letter struct {
	ID            LetterID `bson:"_id"`
	Class         string   `bson:"class"`
	Reason        string   `bson:"reason"` // clipped to 8 KiB
	Type          string   `bson:"type,omitempty"`
	AggregateType string   `bson:"aggregatetype,omitempty"`
	AggregateID   string   `bson:"aggregateid,omitempty"`
	ContentType   string   `bson:"contenttype,omitempty"`
	SchemaVersion string   `bson:"schemaversion,omitempty"`
	Origin        `bson:",inline"`

	Time    time.Time      `bson:"time"` // of the record
	Key     []byte         `bson:"key"`  // nil: null
	Value   []byte         `bson:"value"`
	Headers []LetterHeader `bson:"headers"`
	Size    int            `bson:"size"`             // bytes of the value
	Chunks  int            `bson:"chunks,omitempty"` // number of documents that hold the value instead

	Source       LetterSource `bson:"source"`
	Attempts     int          `bson:"attempts"`
	History      []Failure    `bson:"history"`
	FirstFailure time.Time    `bson:"firstFailure"`
	LastFailure  time.Time    `bson:"lastFailure"`
	MovedAt      time.Time    `bson:"movedAt"`            // server time
	Replayed     *Replayed    `bson:"replayed,omitempty"` // nil: not requeued
}

// LetterSource describes where the message was given up.
type LetterSource struct {
	Kind string `bson:"kind"` // "handler"
	Node string `bson:"node,omitempty"`
}

// Replayed describes the requeue of a letter.
type Replayed struct {
	At       time.Time `bson:"at"` // server time
	Actor    string    `bson:"actor"`
	Note     string    `bson:"note,omitempty"`
	Topic    string    `bson:"topic"`
	Delivery int       `bson:"delivery"` // the delivery of the requeued message
}

// maxLetterReason is the maximum length of the reason of a letter, in bytes.
const maxLetterReason = 8 << 10

// newLetter returns the letter of a message that v gives up because of cause.
func newLetter(m *Message, handler string, v verdict, cause error, at time.Time) *Letter {
	l := &Letter{
		ID:            LetterID{Group: m.Group, Handler: handler, NS: m.Source, ID: m.ID, Delivery: m.Delivery},
		Class:         cmp.Or(v.Reason, Class(cause)),
		Type:          m.Name,
		AggregateType: m.Aggregate.Type,
		AggregateID:   m.Aggregate.ID,
		ContentType:   m.ContentType,
		SchemaVersion: m.SchemaVersion,
		Origin:        originOf(m),
		Time:          m.Time,
		Key:           m.Key,
		Value:         m.Value,
		Size:          len(m.Value),
		Source:        LetterSource{Kind: "handler"},
		Attempts:      attemptsSpent(m, v),
		History:       failureHistory(m, v),
		FirstFailure:  at,
		LastFailure:   at,
	}
	if cause != nil {
		l.Reason = clip(cause.Error(), maxLetterReason)
	}
	if len(l.History) > 0 {
		l.FirstFailure, l.LastFailure = l.History[0].At, l.History[len(l.History)-1].At
	}

	// The state of the retries is in fields of the letter. A requeued message starts without it.
	for _, h := range m.Headers {
		switch h.Key {
		case HeaderRetryDue, HeaderRetryHistory, HeaderRetryOrigin, HeaderAttempt, HeaderOnly:
		default:
			l.Headers = append(l.Headers, LetterHeader(h))
		}
	}
	return l
}

// stripContent removes everything that can make the letter impossible to write, or that a Redactor must see. The place of
// the record, the identity of the message and the counts stay.
func (l *Letter) stripContent() {
	l.Key, l.Value, l.Headers, l.History = nil, nil, nil, nil
	l.Type = clip(l.Type, maxReason)
	l.AggregateType, l.AggregateID, l.ContentType, l.SchemaVersion = "", "", "", ""
	l.Reason = "the whole letter could not be written; the consumer reported the reason; the record is at " +
		l.Origin.String()
}

// Message returns the original message, at the place of its first record.
func (l *Letter) Message() *Message {
	m := &Message{
		Topic:         l.Topic,
		Partition:     l.Partition,
		Offset:        l.Offset,
		LeaderEpoch:   -1,
		Time:          l.Time,
		Key:           l.Key,
		Value:         l.Value,
		ID:            l.ID.ID,
		Source:        l.ID.NS,
		Name:          l.Type,
		Aggregate:     event.Aggregate{Type: l.AggregateType, ID: l.AggregateID},
		ContentType:   l.ContentType,
		SchemaVersion: l.SchemaVersion,
		Delivery:      l.ID.Delivery,
		Attempt:       1,
		Group:         l.ID.Group,
	}
	for _, h := range l.Headers {
		m.Headers = append(m.Headers, event.Header(h))
	}
	return m
}

// The headers that a record in a dead letter topic has in addition to the original headers.
const (
	HeaderDeadClass    = "dead-class"
	HeaderDeadReason   = "dead-reason" // clipped to 512 bytes
	HeaderDeadGroup    = "dead-group"
	HeaderDeadHandler  = "dead-handler"
	HeaderDeadAttempts = "dead-attempts"
	HeaderDeadAt       = "dead-at" // Unix milliseconds
)

// DeadTopicName returns the default name of the dead letter topic of a topic and a group: "<topic>.<group>.dead".
func DeadTopicName(topic, group string) string { return topic + "." + group + ".dead" }

// deadTopicRecord returns the letter as a record for a dead letter topic.
func (l *Letter) deadTopicRecord() *Message {
	m := l.Message()
	for _, h := range []event.Header{
		{Key: HeaderDeadClass, Value: []byte(l.Class)},
		{Key: HeaderDeadReason, Value: []byte(clip(l.Reason, maxReason))},
		{Key: HeaderDeadGroup, Value: []byte(l.ID.Group)},
		{Key: HeaderDeadHandler, Value: []byte(l.ID.Handler)},
		{Key: HeaderDeadAttempts, Value: strconv.AppendInt(nil, int64(l.Attempts), 10)},
		{Key: HeaderDeadAt, Value: formatMillis(l.LastFailure)},
		{Key: HeaderRetryOrigin, Value: []byte(l.Origin.String())},
	} {
		m.SetHeader(h.Key, h.Value)
	}
	return m
}
