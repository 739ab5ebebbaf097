package consumer

import (
	"cmp"
	"context"
	"slices"
	"strconv"

	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/service/consumerparts"
	"github.com/outrelay/outrelay/internal/service/letterparts"
	"github.com/outrelay/outrelay/pkg/consumer/deadletter"
	"github.com/outrelay/outrelay/pkg/event"
)

// WithDeadLetters configures the dead letters of the consumer. Without it they are stored in the collection
// deadletter.DefaultCollection of the consumer's database, until they are discarded.
func WithDeadLetters(opts ...deadletter.Option) Option {
	return option(func(s *settings) { s.letters = append(s.letters, opts...) })
}

// openLetters returns the dead letters. Without a database, they come from the inbox.
func openLetters(db *mongo.Database, x consumerparts.Inbox, opts []deadletter.Option) (*deadletter.Desk, error) {
	if own, ok := x.(interface {
		Letters(opts []deadletter.Option) (*deadletter.Desk, error)
	}); ok && db == nil {
		return own.Letters(opts)
	}
	return deadletter.New(db, opts...)
}

// maxLetterReason is the maximum length of the reason of a letter, in bytes.
const maxLetterReason = 8 << 10

// newLetter returns the letter of a message that v gives up because of cause.
func newLetter(m *Message, handler string, v verdict, cause error) *deadletter.Letter {
	// A message in a retry topic has its first place in its headers.
	origin := originOf(m)
	l := &deadletter.Letter{
		ID: deadletter.ID{
			Group: m.Group, Handler: handler,
			Topic: origin.Topic, Partition: origin.Partition, Offset: origin.Offset,
			Source: m.Source, Message: m.ID, Delivery: m.Delivery,
		},
		Class:         cmp.Or(v.Reason, classOf(cause)),
		Name:          m.Name,
		Aggregate:     m.Aggregate,
		ContentType:   m.ContentType,
		SchemaVersion: m.SchemaVersion,
		Time:          m.Time,
		Key:           m.Key,
		Value:         m.Value,
		Attempts:      attemptsSpent(m, v),
		History:       failureHistory(m, v),
	}
	if cause != nil {
		l.Reason = record.Clip(cause.Error(), maxLetterReason)
	}

	// The state of the retries is in fields of the letter. A requeued message starts without it.
	for _, h := range m.Headers {
		if !slices.Contains(retryHeaders, h.Key) {
			l.Headers = append(l.Headers, h)
		}
	}
	return l
}

// putLetter stores the letter of a message, in its topic first if there is one.
func (d *disposer) putLetter(ctx context.Context, l *deadletter.Letter) error {
	publish := func(ctx context.Context, topic string) error {
		err := d.publishMessage(ctx, topic, l.ID.Topic, newLetterRecord(l))
		// A letter that its topic cannot take is still stored in MongoDB.
		if isTooLarge(err) || isTopicUnavailable(err) {
			d.report(err)
			return nil
		}
		return err
	}

	omitted, err := d.letters.Put(ctx, letterparts.Key{}, l, publish)
	if omitted != nil {
		d.report(omitted)
	}
	return err
}

// newLetterRecord returns the letter as a record for a topic.
func newLetterRecord(l *deadletter.Letter) *Message {
	m := &Message{Key: l.Key, Value: l.Value, Headers: slices.Clone(l.Headers)}
	add := func(name, value string) {
		m.Headers = append(m.Headers, event.Header{Key: name, Value: []byte(value)})
	}
	add("dead-class", l.Class)

	add("dead-reason", record.Clip(l.Reason, maxReason))
	add("dead-group", l.ID.Group)
	add("dead-handler", l.ID.Handler)
	add("dead-attempts", strconv.Itoa(l.Attempts))
	if n := len(l.History); n > 0 {
		add("dead-at", string(formatMillis(l.History[n-1].At)))
	}
	return m
}
