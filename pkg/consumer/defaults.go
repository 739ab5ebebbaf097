package consumer

import (
	"context"

	"github.com/outrelay/outrelay/pkg/event"
)

// defaults are the settings of the disposer.
type defaults struct {
	disposer   disposerConfig
	lettersSet bool // the option Letters was given, possibly with nil
}

// Letters sets the store of dead letters. Defaults to the collection DefaultLetters of the consumer's database. With nil no
// dead letters are stored, and DeadTopics is required.
func Letters(store LetterStore) Option {
	return option(func(s *settings) { s.defaults.disposer.Letters, s.defaults.lettersSet = store, true })
}

// DeadTopics also writes each dead letter to a topic, before it is stored. nil uses DeadTopicName. Missing
// topics are created.
func DeadTopics(name func(topic, group string) string) Option {
	if name == nil {
		name = DeadTopicName
	}
	return option(func(s *settings) { s.defaults.disposer.DeadTopic = name })
}

// RedactLetters adds functions that may change dead letters before they are written.
func RedactLetters(rs ...Redactor) Option {
	return option(func(s *settings) { s.defaults.disposer.Redact = append(s.defaults.disposer.Redact, rs...) })
}

// Outbox stores events: an *outbox.Box, or the in-memory one.
type Outbox interface {
	Append(ctx context.Context, events ...event.Event) error
}

// WithOutbox sets the outbox for fault events. It must be in the database of the consumer's transactions.
func WithOutbox(box Outbox) Option {
	return option(func(s *settings) { s.defaults.disposer.Outbox = box })
}

// PublishFaults publishes an event when a message is given up.
func PublishFaults(f Faults) Option {
	return option(func(s *settings) { s.defaults.disposer.Faults = &f })
}

// defaultDisposer returns the disposer of a consumer without a Disposer.
func (c *Consumer) defaultDisposer(report func(error)) (messageDisposer, error) {
	cfg := c.s.defaults.disposer
	cfg.Report = report
	cfg.Publisher = c.transport
	cfg.Transact = c.transactor()

	if !c.s.defaults.lettersSet {
		if c.db == nil {
			return nil, &unsupportedError{
				Operation: "a consumer without a database and without a Disposer",
				Needs:     "Letters, for its dead letters",
			}
		}
		letters, err := NewDeadLetters(c.db)
		if err != nil {
			return nil, err
		}
		cfg.Letters = letters
	}
	return newDisposer(cfg)
}

// retryTopics returns the names of the retry topics of the given topics, for the handler with the most of them.
func (c *Consumer) retryTopics(topics []string) []string {
	most := 0
	for _, r := range c.reg.snapshot().all {
		most = max(most, len(r.decider.topics))
	}

	var names []string
	for _, topic := range topics {
		for n := range most {
			names = append(names, RetryTopicName(topic, c.group, n+1))
		}
	}
	return names
}
