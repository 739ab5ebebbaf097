package consumer

import (
	"context"
	"errors"
	"slices"

	"github.com/outrelay/outrelay/pkg/event"
)

// defaults are the settings of the default policy and the default disposer.
type defaults struct {
	disposer   DisposerConfig
	lettersSet bool // the option Letters was given, possibly with nil
}

// Letters sets the store of dead letters. Defaults to the collection DefaultLetters of the consumer's database. With nil no
// dead letters are stored, and DeadTopics is required.
func Letters(store LetterStore) Option {
	return option(func(s *settings) { s.defaults.disposer.Letters, s.defaults.lettersSet = store, true })
}

// DeadTopics also writes each dead letter to a topic, before it is stored. nil uses DeadTopicName. The topics must exist,
// unless CreateTopics is given.
func DeadTopics(name func(topic, group string) string) Option {
	if name == nil {
		name = DeadTopicName
	}
	return option(func(s *settings) { s.defaults.disposer.DeadTopic = name })
}

// CreateTopics creates missing retry topics and dead letter topics when a message must be moved there. They get as many
// partitions as the message's own topic. Without CreateTopics the topics must exist: a message whose retry topic is missing
// becomes a dead letter.
func CreateTopics() Option {
	return option(func(s *settings) { s.defaults.disposer.CreateTopics = true })
}

// RedactLetters adds functions that may change dead letters before they are written.
func RedactLetters(rs ...Redactor) Option {
	return option(func(s *settings) { s.defaults.disposer.Redact = append(s.defaults.disposer.Redact, rs...) })
}

// Outbox stores events: an *outbox.Box, or the in-memory one.
type Outbox interface {
	Append(ctx context.Context, events ...event.Event) error
}

// WithOutbox sets the outbox for Rule.Schedule and for fault events. It must be in the database of the consumer's transactions.
func WithOutbox(box Outbox) Option {
	return option(func(s *settings) { s.defaults.disposer.Outbox = box })
}

// PublishFaults publishes an event when a message is given up.
func PublishFaults(f Faults) Option {
	return option(func(s *settings) { s.defaults.disposer.Faults = &f })
}

// defaultDisposer returns the disposer of a consumer without a Disposer.
func (c *Consumer) defaultDisposer(report func(error)) (Disposer, error) {
	cfg := c.s.defaults.disposer
	cfg.Report = report
	cfg.Publisher = c.transport
	cfg.Transact = c.transactor()

	if !c.s.defaults.lettersSet {
		if c.db == nil {
			return nil, &UnsupportedError{
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
	return NewDisposer(cfg)
}

// Unpark requeues messages that were parked because no handler was registered for their type, if one is registered now. It
// returns how many. If the store of dead letters cannot requeue, as an in-memory store cannot, it returns an
// *UnsupportedError.
func (c *Consumer) Unpark(ctx context.Context, actor string) (int64, error) {
	type unparker interface {
		Unpark(ctx context.Context, group string, r Replay, takes func(m *Message) bool) (int64, error)
	}

	store := c.s.defaults.disposer.Letters
	if !c.s.defaults.lettersSet && c.db != nil {
		letters, err := NewDeadLetters(c.db)
		if err != nil {
			return 0, err
		}
		store = letters
	}

	x, ok := store.(unparker)
	if !ok {
		return 0, &UnsupportedError{
			Operation: "requeueing parked messages",
			Needs:     "a store with Unpark, such as NewDeadLetters returns",
		}
	}

	replay := Replay{Publisher: c.transport, Actor: actor, Note: "there is a handler"}
	return x.Unpark(ctx, c.group, replay, func(m *Message) bool {
		return len(c.reg.snapshot().forType(m.Name)) > 0
	})
}

// topicMover is a Decider that can move messages to topics, such as retry topics.
type topicMover interface {
	Topics(group, topic string) []string
	Validate() error
	needsOutbox() bool
}

// retryTopics returns the topics to which the policies of the handlers move messages, without the given topics. The error
// joins the mistakes of all policies.
func (c *Consumer) retryTopics(topics []string) ([]string, error) {
	deciders := []Decider{c.s.decider}
	for _, r := range c.reg.snapshot().all {
		deciders = append(deciders, r.decider)
	}

	var names []string
	var errs []error
	for _, d := range deciders {
		mover, ok := d.(topicMover)
		if !ok {
			continue
		}
		errs = append(errs, mover.Validate(), c.checkRequirements(mover))

		for _, topic := range topics {
			for _, name := range mover.Topics(c.group, topic) {
				if !slices.Contains(names, name) && !slices.Contains(topics, name) {
					names = append(names, name)
				}
			}
		}
	}
	return names, errors.Join(errs...)
}

// checkRequirements returns an error if a policy needs an outbox and the consumer has none. It checks nothing if the user
// gave a Disposer, because the Disposer has the outbox itself.
func (c *Consumer) checkRequirements(mover topicMover) error {
	if c.s.disposer == nil && mover.needsOutbox() && c.s.defaults.disposer.Outbox == nil {
		return &UnsupportedError{Operation: "Schedule of a policy", Needs: "an outbox, by WithOutbox"}
	}
	return nil
}
