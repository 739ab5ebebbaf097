package consumer

import (
	"context"
	"errors"
	"slices"
)

// defaults are settings of the default policy and disposer.
type defaults struct {
	disposer DisposerConfig
	lettersSet  bool // Letters was said
}

// defaultDecider is the policy of handlers that name none.
func defaultDecider() Decider { return DefaultPolicy() }

// Letters keeps dead letters in that store. Defaults to the collection DefaultLetters of the consumer's database; nil keeps
// none, and then DeadTopics is needed.
func Letters(store LetterStore) Option {
	return option(func(s *settings) { s.defaults.disposer.Letters, s.defaults.lettersSet = store, true })
}

// DeadTopics writes each dead letter to a topic as well, before it is stored. nil is DeadTopicName. The topics have to exist.
func DeadTopics(name func(topic, group string) string) Option {
	if name == nil {
		name = DeadTopicName
	}
	return option(func(s *settings) { s.defaults.disposer.DeadTopic = name })
}

// CreateTopics makes retry topics, and topics of dead letters, that are missing when a message is to go there, with as many
// partitions as the message's own topic. Without it they have to exist: a message without its retry topic becomes a dead letter.
func CreateTopics() Option {
	return option(func(s *settings) { s.defaults.disposer.CreateTopics = true })
}

// RedactLetters adds functions that may change dead letters before they are written anywhere.
func RedactLetters(rs ...Redactor) Option {
	return option(func(s *settings) { s.defaults.disposer.Redact = append(s.defaults.disposer.Redact, rs...) })
}

// Via is the outbox of Rule.Schedule and of fault events. It belongs to the database of the consumer's transactions.
func Via(box Outbox) Option {
	return option(func(s *settings) { s.defaults.disposer.Outbox = box })
}

// PublishFaults tells others by an event when a message is given up.
func PublishFaults(f Faults) Option {
	return option(func(s *settings) { s.defaults.disposer.Faults = &f })
}

// BlockingKeys is the gate of Rule.BlockKey. Handlers whose policy has such a rule are inside of its Middleware.
func BlockingKeys(g *KeyGate) Option {
	return option(func(s *settings) { s.defaults.disposer.Gate = g })
}

// defaultDisposer carries out verdicts where no Disposer was given.
func (c *Consumer) defaultDisposer(report func(error)) (Disposer, error) {
	cfg := c.s.defaults.disposer
	cfg.Report = report
	cfg.Publisher = c.transport
	cfg.Transact = c.transactor()
	if !c.s.defaults.lettersSet {
		if c.db == nil {
			return nil, &UnsupportedError{Operation: "a consumer without a database and without a Disposer", Needs: "Letters, for its dead letters"}
		}
		letters, err := NewDeadLetters(c.db)
		if err != nil {
			return nil, err
		}
		cfg.Letters = letters
	}
	return NewDisposer(cfg)
}

// Unpark gives messages that were parked because no handler took their type back to their topic, if one does now. It
// returns how many. Without dead letters that can give back, an in-memory store for example, it is an *UnsupportedError.
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
		return 0, &UnsupportedError{Operation: "giving back parked messages", Needs: "dead letters that can, as NewDeadLetters makes"}
	}
	return x.Unpark(ctx, c.group, Replay{Publisher: c.transport, Actor: actor, Note: "there is a handler"}, func(m *Message) bool {
		return len(c.reg.snapshot().of(m.Type)) > 0
	})
}

// topicMover is a Decider that moves messages to topics of its own.
type topicMover interface {
	Topics(group, topic string) []string
	Validate() error
	needs() (outbox, gate bool)
}

// retryTopics are the topics beside those of the consumer that the policies of its handlers move messages to.
func (c *Consumer) retryTopics(topics []string) ([]string, error) {
	deciders := []Decider{c.s.decider}
	for _, r := range c.reg.snapshot().all {
		deciders = append(deciders, r.decider)
	}
	var names []string
	var errs []error
	for _, d := range deciders {
		t, ok := d.(topicMover)
		if !ok {
			continue
		}
		errs = append(errs, t.Validate(), c.checkRequirements(t))
		for _, topic := range topics {
			for _, name := range t.Topics(c.group, topic) {
				if !slices.Contains(names, name) && !slices.Contains(topics, name) {
					names = append(names, name)
				}
			}
		}
	}
	return names, errors.Join(errs...)
}

// wrapWithGate puts a handler whose policy blocks keys behind the gate, outside of all other middleware: it goes by the key and
// the id of the record.
func (c *Consumer) wrapWithGate(d Decider, h Handler) Handler {
	t, ok := d.(topicMover)
	g := c.s.defaults.disposer.Gate
	if !ok || g == nil {
		return h
	}
	if _, blocks := t.needs(); !blocks {
		return h
	}
	return g.Middleware()(h)
}

// checkRequirements says what a policy needs that the consumer does not have. A Disposer that was given knows by itself.
func (c *Consumer) checkRequirements(t topicMover) error {
	if c.s.disposer != nil {
		return nil
	}
	var errs []error
	box, gate := t.needs()
	if box && c.s.defaults.disposer.Outbox == nil {
		errs = append(errs, &UnsupportedError{Operation: "Schedule of a policy", Needs: "an outbox, by Via"})
	}
	if gate && c.s.defaults.disposer.Gate == nil {
		errs = append(errs, &UnsupportedError{Operation: "BlockKey of a policy", Needs: "a KeyGate, by BlockingKeys"})
	}
	return errors.Join(errs...)
}
