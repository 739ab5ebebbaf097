package consumer

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/segmentio/kafka-go"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/record"
	"github.com/outrelay/outrelay/pkg/event"
	"github.com/outrelay/outrelay/pkg/outbox"
)

// Redactor may change a dead letter before it is written. It can clear its body, key, reason,
// headers and the reasons in its history. If it returns an error of Discard, no letter is written. After any
// other error, and after a panic, the letter that is written contains only the place and the
// identity of the message.
type Redactor func(ctx context.Context, l *Letter) error

// DisposerConfig configures a disposer. If a verdict needs a field that is nil, the message becomes
// a dead letter instead.
type DisposerConfig struct {
	// Publisher writes to retry topics, to the topics of messages, and to dead letter topics.
	Publisher Publisher
	// Letters stores dead letters as documents.
	Letters LetterStore
	// DeadTopic returns the dead letter topic of a topic and a group, as DeadTopicName does. If it
	// is nil, dead letters are written only to Letters. If both are set, the topic is written
	// first.
	DeadTopic func(topic, group string) string
	// CreateTopics creates missing topics, with as many partitions as the message's own topic. The
	// Publisher must support it, as Kafka does. Otherwise a message whose retry topic is missing
	// becomes a dead letter.
	CreateTopics bool
	// Outbox stores scheduled messages and fault events.
	Outbox Outbox
	// Transact runs the appends to Outbox: outbox.Box.Transaction on the client of its database.
	Transact Transactor
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

// MessageDisposer carries out the verdict on a message that is not handled now. Dispose returns nil
// only after its last write is acknowledged by all in-sync replicas of Kafka or by a majority of
// MongoDB. So the message's offset is committed only then. After a crash in between, Dispose is
// called again. Of two copies in a retry topic, the inbox rejects the second. Letters and events
// get the same id again.
type MessageDisposer struct{ cfg DisposerConfig }

var _ Disposer = (*MessageDisposer)(nil)

// NewDisposer returns a disposer. It does no I/O. Its errors are ErrConfiguration.
func NewDisposer(cfg DisposerConfig) (*MessageDisposer, error) {
	var errs []error
	bad := func(wrong bool, what string) {
		if wrong {
			errs = append(errs, fmt.Errorf("%w: disposer: %s", ErrConfiguration, what))
		}
	}

	bad(cfg.Letters == nil && cfg.DeadTopic == nil, "dead letters need Letters or a DeadTopic")
	bad(cfg.DeadTopic != nil && cfg.Publisher == nil, "a DeadTopic needs a Publisher")
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
	return &MessageDisposer{cfg: cfg}, nil
}

// EnsureIndexes creates the indexes of the dead letters, if their store has a method EnsureIndexes.
func (d *MessageDisposer) EnsureIndexes(ctx context.Context) error {
	if x, ok := d.cfg.Letters.(interface {
		EnsureIndexes(ctx context.Context) error
	}); ok {
		return x.EnsureIndexes(ctx)
	}
	return nil
}

func (d *MessageDisposer) reportError(err error) {
	if d.cfg.Report != nil {
		d.cfg.Report(err)
	}
}

// Dispose implements Disposer.
func (d *MessageDisposer) Dispose(ctx context.Context, m *Message, handler string, v Verdict, cause error) error {
	err := d.disposeByAction(ctx, m, handler, v, cause)
	if err != nil {
		return fmt.Errorf("disposing of message %s (%s) by %s: %w", clip(m.ID, maxReason), originOf(m), v.Action, err)
	}
	return nil
}

// disposeByAction carries out v. A message that cannot be moved becomes a dead letter.
func (d *MessageDisposer) disposeByAction(ctx context.Context, m *Message, handler string, v Verdict, cause error) error {
	switch v.Action {
	case RetryTopic, Requeue, Schedule:
		err := d.moveMessage(ctx, m, handler, v)
		var why *immovableError
		if !errors.As(err, &why) {
			return err
		}
		return d.writeDeadLetter(ctx, m, handler, v, errors.Join(cause, why))

	case Skip:
		if v.Reason == ClassDuplicate {
			return nil
		}
		return d.publishLetterFault(ctx, newLetter(m, handler, v, cause, d.cfg.Now()), m)

	case DeadLetter, Park:
		return d.writeDeadLetter(ctx, m, handler, v, cause)

	default:
		return &UnsupportedError{Operation: "disposing by " + v.Action.String(), Needs: "a consumer, which carries it out"}
	}
}

// immovableError reports that a message can never be moved to the place that the policy chose. The
// message is given up.
type immovableError struct{ why string }

func (e *immovableError) Error() string { return "it cannot be retried: " + e.why }

// moveMessage moves the message to another place.
func (d *MessageDisposer) moveMessage(ctx context.Context, m *Message, handler string, v Verdict) error {
	switch {
	case v.Action == Schedule && (d.cfg.Outbox == nil || d.cfg.Transact == nil):
		return &immovableError{"scheduling needs an Outbox"}
	case v.Action != Schedule && d.cfg.Publisher == nil:
		return &immovableError{"it needs a Publisher"}
	}

	if v.Action == Schedule {
		return d.scheduleRetry(ctx, m, handler, v)
	}

	topic, due := originOf(m).Topic, time.Time{}
	if v.Action == RetryTopic {
		topic = v.Topic
	}
	if v.Delay > 0 && v.Action == RetryTopic {
		due = d.cfg.Now().Add(v.Delay)
	}

	err := d.publishMessage(ctx, topic, originOf(m).Topic, newRetryMessage(m, handler, v, due))
	switch {
	case isTooLarge(err):
		return &immovableError{"with its retry headers it is larger than topic " + topic + " allows"}
	case isTopicUnavailable(err):
		return &immovableError{err.Error()}
	}
	return err
}

// publishMessage writes m to a topic. If the topic is missing and CreateTopics is set, it creates
// the topic like the topic like.
func (d *MessageDisposer) publishMessage(ctx context.Context, topic, like string, m *Message) error {
	type creator interface {
		CreateTopic(ctx context.Context, name, like string) error
	}

	err := d.cfg.Publisher.Publish(ctx, topic, []*Message{m})
	if c, ok := d.cfg.Publisher.(creator); ok && d.cfg.CreateTopics && errors.Is(err, kafka.UnknownTopicOrPartition) {
		if err := c.CreateTopic(ctx, topic, like); err != nil {
			return err
		}
		err = d.cfg.Publisher.Publish(ctx, topic, []*Message{m})
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

// scheduleRetry appends the message to the outbox as an event that the relay sends to its topic
// later. The id of the event names the record of the message. So a repeated call appends nothing,
// and the next failure, of the new record, is another event.
func (d *MessageDisposer) scheduleRetry(ctx context.Context, m *Message, handler string, v Verdict) error {
	due := d.cfg.Now().Add(v.Delay)
	err := d.appendEvent(ctx, newScheduledRetry(newRetryMessage(m, handler, v, time.Time{}), handler, due))
	if errors.Is(err, ErrUnfit) {
		return &immovableError{err.Error()}
	}
	return err
}

// appendEvent appends one event in a separate transaction. It returns nil if the event exists already.
func (d *MessageDisposer) appendEvent(ctx context.Context, ev event.Event) error {
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

// newScheduledRetry returns the message as a scheduled event. Headers that the outbox reserves get
// other names, which restoreHeaders replaces by the original ones.
func newScheduledRetry(m *Message, handler string, due time.Time) event.Event {
	id := boundIdentity(fmt.Sprintf("retry/%s/%s/%s/%s/%d/%s/%d/%d",
		m.Group, handler, m.Source, m.ID, m.Delivery, m.Topic, m.Partition, m.Offset))
	origin := originOf(m)
	opts := []event.Option{event.WithTopic(origin.Topic), event.WithDueAt(due), event.WithID(id)}
	if len(m.Key) > 0 {
		opts = append(opts, event.WithKey(string(m.Key)))
	} else {
		opts = append(opts, event.WithHeader(headerNoKey, []byte("true")))
	}
	if m.SchemaVersion != "" {
		opts = append(opts, event.WithSchemaVersion(m.SchemaVersion))
	}

	// The relay wraps the payload again.
	structured := isStructured(m.Headers)
	if structured {
		if inner, err := Decode(&Record{Topic: m.Topic, Key: m.Key, Value: m.Value, Headers: m.Headers}); err == nil {
			m.Value = inner.Value
		}
	}

	for _, h := range m.Headers {
		name := h.Key
		switch {
		case isReservedHeader(name) || presetHeaders[name] && !structured:
			name = keptPrefix + name
		case presetHeaders[name]:
			continue // the relay writes it again
		}
		opts = append(opts, event.WithHeader(name, h.Value))
	}
	if !structured {
		opts = append(opts, event.WithHeader(headerDropPreset, []byte("true")))
	}

	var payload event.Payload
	if m.Value != nil {
		payload = event.Bytes(m.ContentType, m.Value)
	}
	about := event.Aggregate{Type: cmp.Or(m.Aggregate.Type, "retry"), ID: cmp.Or(m.Aggregate.ID, m.ID)}
	return event.New(about, cmp.Or(m.Name, "retry"), payload, opts...)
}

// presetHeaders has the headers that the relay writes from the fields of an event.
var presetHeaders = map[string]bool{
	record.HeaderType: true, record.HeaderAggregateType: true, record.HeaderAggregateID: true,
	record.HeaderContentType: true, record.HeaderSchemaVersion: true,
	record.HeaderCESpecVersion: true, record.HeaderCEID: true, record.HeaderCESource: true, record.HeaderCEType: true,
	record.HeaderCESubject: true, record.HeaderCETime: true, record.HeaderCESchemaVersion: true,
	record.HeaderHTTPContentType: true,
}

// writeDeadLetter writes a dead letter: the topic first, then the document, then the fault event.
func (d *MessageDisposer) writeDeadLetter(ctx context.Context, m *Message, handler string, v Verdict, cause error) error {
	if v.Action == Park {
		v.Reason = cmp.Or(v.Reason, ClassNoHandler)
	}

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

	if err := d.publishLetter(ctx, l, v); err != nil {
		return err
	}
	if d.cfg.Letters != nil {
		if err := d.cfg.Letters.Put(ctx, l); err != nil {
			return err
		}
	}
	if v.Action == Park || v.Bare {
		return nil
	}
	return d.publishLetterFault(ctx, l, m)
}

// redactLetter calls the functions of Redact. An error or a panic of one of them makes the letter unfit.
func (d *MessageDisposer) redactLetter(ctx context.Context, l *Letter) (err error) {
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
func (d *MessageDisposer) publishLetter(ctx context.Context, l *Letter, v Verdict) error {
	var topic string
	switch {
	case v.Topic != "" && v.Action == DeadLetter && d.cfg.Publisher != nil:
		topic = v.Topic
	case d.cfg.DeadTopic != nil:
		topic = d.cfg.DeadTopic(l.Topic, l.ID.Group)
	default:
		return nil
	}

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
