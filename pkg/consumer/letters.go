package consumer

import (
	"cmp"
	"context"
	"slices"
	"strconv"

	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/base/module"
	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/service/consuming"
	"github.com/outrelay/outrelay/pkg/consumer/deadletter"
	"github.com/outrelay/outrelay/pkg/event"
)

// WithDeadLetters configures the dead letters of the consumer. Without it they are stored in the collection
// deadletter.DefaultCollection of the consumer's database, until they are discarded.
func WithDeadLetters(opts ...deadletter.Option) Option {
	return option(func(settings *settings) { settings.letters = append(settings.letters, opts...) })
}

// openLetters returns the dead letters. Without a database, they come from the inbox.
func openLetters(db *mongo.Database, inbox consuming.Inbox, opts []deadletter.Option) (*deadletter.Desk, error) {
	if own, ok := inbox.(interface {
		Letters(opts []deadletter.Option) (*deadletter.Desk, error)
	}); ok && db == nil {
		return own.Letters(opts)
	}
	return deadletter.New(db, opts...)
}

// maxLetterReason is the maximum length of the reason of a letter, in bytes.
const maxLetterReason = 8 << 10

// newLetter returns the letter of a message that verdict gives up because of cause.
func newLetter(message *Message, handler string, verdict verdict, cause error) *deadletter.Letter {
	// A message in a retry topic has its first place in its headers.
	origin := originOf(message)
	letter := &deadletter.Letter{
		ID: deadletter.ID{
			Group: message.Group, Handler: handler,
			Topic: origin.Topic, Partition: origin.Partition, Offset: origin.Offset,
			Source: message.Source, Message: message.ID, Delivery: message.Delivery,
		},
		Class:         cmp.Or(verdict.Reason, classOf(cause)),
		Name:          message.Name,
		Aggregate:     message.Aggregate,
		ContentType:   message.ContentType,
		SchemaVersion: message.SchemaVersion,
		Time:          message.Time,
		Key:           message.Key,
		Value:         message.Value,
		Attempts:      attemptsSpent(message, verdict),
		History:       failureHistory(message, verdict),
	}
	if cause != nil {
		letter.Reason = record.Clip(cause.Error(), maxLetterReason)
	}

	// The state of the retries is in fields of the letter. A requeued message starts without it.
	for _, h := range message.Headers {
		if !slices.Contains(retryHeaders, h.Key) {
			letter.Headers = append(letter.Headers, h)
		}
	}

	// Decode gives a message the key as its aggregate id if the record has none. The letter has the key anyway.
	if _, has := message.Header(record.HeaderAggregateID); !has && letter.Aggregate.ID == string(message.Key) {
		letter.Aggregate.ID = ""
	}
	return letter
}

// putLetter stores the letter of a message, in its topic first if there is one. It returns the value for WithGivenUpHook.
func (d *disposer) putLetter(ctx context.Context, letter *deadletter.Letter) (*GivenUp, error) {
	publish := func(ctx context.Context, topic string) error {
		err := d.publishMessage(ctx, topic, letter.ID.Topic, 0, newLetterRecord(letter))
		// A letter that its topic cannot take is still stored in MongoDB.
		if isTooLarge(err) || isTopicUnavailable(err) {
			d.reportLetter("cannot copy the dead letter to its topic; it is stored without the copy", letter, err)
			return nil
		}
		return err
	}

	omitted, err := d.letters.Put(ctx, module.Key{}, letter, publish)
	if omitted != nil {
		d.reportLetter("cannot keep the content of the dead letter, or its notification; the letter is stored", letter, omitted)
	}
	return &GivenUp{ID: letter.ID, Name: letter.Name, Class: letter.Class, Reason: record.Clip(letter.Reason, maxReason), Attempts: letter.Attempts}, err
}

// reportLetter reports a partial success, with the handler and the place of letter.
func (d *disposer) reportLetter(message string, letter *deadletter.Letter, err error) {
	id := letter.ID
	d.report(message, err, "handler", id.Handler, "topic", id.Topic, "partition", id.Partition, "offset", id.Offset)
}

// newLetterRecord returns the letter as a record for a topic.
func newLetterRecord(letter *deadletter.Letter) *Message {
	message := &Message{Key: letter.Key, Value: letter.Value, Headers: slices.Clone(letter.Headers)}
	add := func(name, value string) {
		message.Headers = append(message.Headers, event.Header{Key: name, Value: []byte(value)})
	}
	add("dead-class", letter.Class)

	add("dead-reason", record.Clip(letter.Reason, maxReason))
	add("dead-group", letter.ID.Group)
	add("dead-handler", letter.ID.Handler)
	add("dead-attempts", strconv.Itoa(letter.Attempts))
	if n := len(letter.History); n > 0 {
		add("dead-at", string(formatMillis(letter.History[n-1].At)))
	}
	return message
}
