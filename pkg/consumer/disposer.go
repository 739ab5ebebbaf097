package consumer

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/segmentio/kafka-go"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/consumerparts"
	"github.com/outrelay/outrelay/internal/transport"
	"github.com/outrelay/outrelay/pkg/event"
	"github.com/outrelay/outrelay/pkg/outbox"
)

// Redactor may change a dead letter before it is written. It can clear its body, key, reason,
// headers and the reasons in its history. If it returns an error of Discard, no letter is written. After any
// other error, and after a panic, the letter that is written contains only the place and the
// identity of the message.
type Redactor func(ctx context.Context, l *Letter) error

// disposerConfig configures a disposer.
type disposerConfig struct {
	// Publisher writes to retry topics and to dead letter topics.
	Publisher transport.Publisher
	// Letters stores dead letters as documents.
	Letters LetterStore
	// DeadTopic returns the dead letter topic of a topic and a group, as DeadTopicName does. If it
	// is nil, dead letters are written only to Letters. If both are set, the topic is written
	// first.
	DeadTopic func(topic, group string) string
	// Outbox stores fault events.
	Outbox Outbox
	// Transact runs the appends to Outbox: outbox.Box.Transaction on the client of its database.
	Transact consumerparts.Transactor
	// Redact has the functions that are called for each letter, in this order.
	Redact []Redactor
	// Faults selects the given-up messages for which a fault event is published. nil selects none.
	Faults *Faults
	// Report is called after a partial success: a letter that is in Letters but not in its topic, a
	// fault event that has no body or was not published. It may be nil.
	Report func(err error)
	// Now is the clock for due times. Defaults to time.Now.
	Now func() time.Time
}

// disposer carries out the verdict on a message that is not handled now. Dispose returns nil
// only after its last write is acknowledged by all in-sync replicas of Kafka or by a majority of
// MongoDB. So the message's offset is committed only then. After a crash in between, Dispose is
// called again. Of two copies in a retry topic, the inbox rejects the second. Letters and events
// get the same id again.
type disposer struct{ cfg disposerConfig }

// newDisposer returns a disposer. It does no I/O.
func newDisposer(cfg disposerConfig) (*disposer, error) {
	var errs []error
	bad := func(wrong bool, what string) {
		if wrong {
			errs = append(errs, fmt.Errorf("consumer: dead letters: %s", what))
		}
	}

	bad(cfg.Letters == nil && cfg.DeadTopic == nil, "they need Letters or DeadTopics")
	bad(cfg.DeadTopic != nil && cfg.Publisher == nil, "DeadTopics needs a Publisher")
	bad(cfg.Outbox != nil && cfg.Transact == nil, "an Outbox needs Transact")
	if cfg.Faults != nil {
		bad(cfg.Faults.Topic == "" && cfg.Outbox == nil, "fault events need an Outbox, or a topic and a Publisher")
		bad(cfg.Faults.Topic != "" && cfg.Publisher == nil, "fault events to a topic need a Publisher")
	}
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}

	if cfg.Now == nil {
		cfg.Now = time.Now
	}
	return &disposer{cfg: cfg}, nil
}

// EnsureIndexes creates the indexes of the dead letters, if their store has a method EnsureIndexes.
func (d *disposer) EnsureIndexes(ctx context.Context) error {
	if x, ok := d.cfg.Letters.(interface {
		EnsureIndexes(ctx context.Context) error
	}); ok {
		return x.EnsureIndexes(ctx)
	}
	return nil
}

func (d *disposer) reportError(err error) {
	if d.cfg.Report != nil {
		d.cfg.Report(err)
	}
}

// Dispose implements messageDisposer. A message that cannot be moved becomes a dead letter.
func (d *disposer) Dispose(ctx context.Context, m *Message, handler string, v verdict, cause error) error {
	var err error
	switch v.Action {
	case actRetryTopic:
		err = d.moveToRetryTopic(ctx, m, handler, v)
		if why, ok := errors.AsType[*immovableError](err); ok {
			err = d.writeDeadLetter(ctx, m, handler, v, errors.Join(cause, why))
		}
	case actDeadLetter:
		err = d.writeDeadLetter(ctx, m, handler, v, cause)
	case actDiscard:
		if v.Reason != ClassDuplicate {
			err = d.publishLetterFault(ctx, newLetter(m, handler, v, cause, d.cfg.Now()), m)
		}
	default:
		err = &unsupportedError{Operation: "disposing by " + v.Action.String(), Needs: "a consumer, which carries it out"}
	}

	if err != nil {
		return fmt.Errorf("disposing of message %s (%s) by %s: %w", clip(m.ID, maxReason), originOf(m), v.Action, err)
	}
	return nil
}

// immovableError reports that a message can never be moved to its retry topic. The message is given up.
type immovableError struct{ why string }

func (e *immovableError) Error() string { return "it cannot be retried: " + e.why }

// moveToRetryTopic moves the message to the topic of v.
func (d *disposer) moveToRetryTopic(ctx context.Context, m *Message, handler string, v verdict) error {
	if d.cfg.Publisher == nil {
		return &immovableError{"it needs a Publisher"}
	}

	err := d.publishMessage(ctx, v.Topic, originOf(m).Topic, newRetryMessage(m, handler, v, d.cfg.Now().Add(v.Delay)))
	switch {
	case isTooLarge(err):
		return &immovableError{"with its retry headers it is larger than topic " + v.Topic + " allows"}
	case isTopicUnavailable(err):
		return &immovableError{err.Error()}
	}
	return err
}

// publishMessage writes m to a topic. If the topic is missing, it creates the topic like the topic like.
func (d *disposer) publishMessage(ctx context.Context, topic, like string, m *Message) error {
	type creator interface {
		CreateTopic(ctx context.Context, name, like string) error
	}

	err := d.cfg.Publisher.Publish(ctx, topic, []transport.Record{recordOf(m)})
	if c, ok := d.cfg.Publisher.(creator); ok && errors.Is(err, kafka.UnknownTopicOrPartition) {
		if err := c.CreateTopic(ctx, topic, like); err != nil {
			return err
		}
		err = d.cfg.Publisher.Publish(ctx, topic, []transport.Record{recordOf(m)})
	}
	if err != nil {
		return fmt.Errorf("publishing to %s (the topic must exist, and the user must be allowed to write to it): %w", topic, err)
	}
	return nil
}

// isTopicUnavailable reports whether a topic accepts no record until an administrator changes the
// cluster: the topic does not exist, its name is illegal, or this user may not write to it.
func isTopicUnavailable(err error) bool {
	for _, code := range []kafka.Error{kafka.UnknownTopicOrPartition, kafka.InvalidTopic, kafka.TopicAuthorizationFailed} {
		if errors.Is(err, code) {
			return true
		}
	}
	return false
}

// isTooLarge reports whether Kafka rejects a record for its size. It would reject the record each time.
func isTooLarge(err error) bool {
	if _, ok := errors.AsType[kafka.MessageTooLargeError](err); ok {
		return true
	}
	return errors.Is(err, kafka.MessageSizeTooLarge)
}

// appendEvent appends one event in a separate transaction. It returns nil if the event exists already.
func (d *disposer) appendEvent(ctx context.Context, ev event.Event) error {
	err := d.cfg.Transact(ctx, func(ctx context.Context) error {
		return d.cfg.Outbox.Append(ctx, ev)
	})
	switch {
	case mongo.IsDuplicateKeyError(err):
		return nil
	case errors.Is(err, event.ErrInvalid), errors.Is(err, outbox.ErrTooLarge):
		return fmt.Errorf("%w: %w", ErrUnfit, err)
	}
	return err
}

// writeDeadLetter writes a dead letter: the topic first, then the document, then the fault event.
func (d *disposer) writeDeadLetter(ctx context.Context, m *Message, handler string, v verdict, cause error) error {
	// A message for one handler, which does not exist any more, keeps the name of that handler.
	if only, ok := m.Header(HeaderOnly); ok && handler == "" {
		if name, ok := strings.CutPrefix(string(only), m.Group+"/"); ok {
			handler = name
		}
	}

	l := newLetter(m, handler, v, cause, d.cfg.Now())
	if v.Bare {
		l.stripContent()
	} else if err := d.redactLetter(ctx, l); err != nil {
		if isDiscard(err) {
			return nil
		}
		return fmt.Errorf("redacting: %w", err)
	}

	if err := d.publishLetter(ctx, l); err != nil {
		return err
	}
	if d.cfg.Letters != nil {
		if err := d.cfg.Letters.Put(ctx, l); err != nil {
			return err
		}
	}
	if l.Class == ClassNoHandler || v.Bare {
		return nil
	}
	return d.publishLetterFault(ctx, l, m)
}

// redactLetter calls the functions of Redact. An error or a panic of one of them makes the letter unfit.
func (d *disposer) redactLetter(ctx context.Context, l *Letter) (err error) {
	defer recoverPanic(&err)
	for _, r := range d.cfg.Redact {
		if err := r(ctx, l); isDiscard(err) {
			return err
		} else if err != nil {
			return fmt.Errorf("%w: %w", ErrUnfit, err)
		}
	}
	return nil
}

// publishLetter writes the letter to its dead letter topic, if there is one. If the topic rejects
// it, the document in Letters is enough.
func (d *disposer) publishLetter(ctx context.Context, l *Letter) error {
	if d.cfg.DeadTopic == nil {
		return nil
	}
	topic := d.cfg.DeadTopic(l.Topic, l.ID.Group)

	err := d.publishMessage(ctx, topic, l.Topic, l.deadTopicRecord())
	switch {
	case (isTooLarge(err) || isTopicUnavailable(err)) && d.cfg.Letters != nil:
		d.reportError(fmt.Errorf("dead letter %s is only in the collection: %w", l.ID, err))
		return nil
	case isTooLarge(err):
		return fmt.Errorf("%w: %w", ErrUnfit, err)
	}
	return err
}
