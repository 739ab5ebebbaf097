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

// Redactor may change a letter before it is written anywhere: blank its body, its key, its reason and those of its history,
// its headers. ErrDrop keeps the letter from being written at all. After any other error, and after a panic, a letter without
// anything of the message but its place and its identity is written instead.
type Redactor func(ctx context.Context, l *Letter) error

// DisposerConfig is what a disposer works with. What is nil is not supported: a verdict that needs it gives up the message
// as a dead letter instead.
type DisposerConfig struct {
	// Publisher writes to retry topics, to the topics of messages, and to topics of dead letters.
	Publisher Publisher
	// Letters keeps dead letters as documents.
	Letters LetterStore
	// DeadTopic names the topic of dead letters of a topic for a group, as DeadTopicName does; nil writes them to Letters
	// alone. With both, the topic is written first.
	DeadTopic func(topic, group string) string
	// CreateTopics makes topics that are missing, with the partitions of the message's own topic. The Publisher has to be
	// one that can, as Kafka is. Without it a message whose retry topic is missing becomes a dead letter.
	CreateTopics bool
	// Outbox takes messages that are scheduled, and fault events.
	Outbox Outbox
	// Transact runs what is appended to Outbox; outbox.Transaction on the client of its database.
	Transact Transactor
	// Redact is called for each letter, in this order.
	Redact []Redactor
	// Faults says for which messages an event tells others that they were given up; nil for none.
	Faults *Faults
	// Gate keeps later messages of a key behind one that was moved away.
	Gate *KeyGate
	// Report gets what could only be done in part: a letter that is in Letters but not in its topic, a fault event without
	// the body or not at all. May be nil.
	Report func(err error)
	// Now is the clock by which due times are set. Defaults to time.Now.
	Now func() time.Time
}

// MessageDisposer carries out what a policy decides for a message that is not handled now. Each of its actions ends in a
// write that is acknowledged by all in-sync replicas of Kafka or by a majority of MongoDB before Dispose returns nil, so the
// message's offset passes only then. After a crash in between it is done again: a copy in a retry topic is refused by the
// inbox if the other one was handled, letters and events have the same id again.
type MessageDisposer struct{ cfg DisposerConfig }

var _ Disposer = (*MessageDisposer)(nil)

// NewDisposer makes a disposer. It does no I/O. Errors are ErrConfiguration.
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
	if cfg.Now == nil {
		cfg.Now = time.Now
	}
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	return &MessageDisposer{cfg: cfg}, nil
}

// EnsureIndexes makes those of the dead letters, if their store has such a method.
func (d *MessageDisposer) EnsureIndexes(ctx context.Context) error {
	if x, ok := d.cfg.Letters.(interface {
		EnsureIndexes(ctx context.Context) error
	}); ok {
		return x.EnsureIndexes(ctx)
	}
	return nil
}

func (d *MessageDisposer) report(err error) {
	if d.cfg.Report != nil {
		d.cfg.Report(err)
	}
}

// Dispose is Disposer's.
func (d *MessageDisposer) Dispose(ctx context.Context, m *Message, handler string, v Verdict, cause error) error {
	err := d.dispose(ctx, m, handler, v, cause)
	if err != nil {
		return fmt.Errorf("disposing of message %s (%s) by %s: %w", clip(m.ID, maxReason), originOf(m), v.Action, err)
	}
	return nil
}

func (d *MessageDisposer) dispose(ctx context.Context, m *Message, handler string, v Verdict, cause error) error {
	switch v.Action {
	case RetryTopic, Requeue, Schedule:
		err := d.move(ctx, m, handler, v)
		var why *immovableError
		if !errors.As(err, &why) {
			return err
		}
		return d.bury(ctx, m, handler, v, errors.Join(cause, why))
	case Discard:
		if v.Reason != ClassDuplicate && v.Reason != ClassDropped {
			if err := d.publishLetterFault(ctx, newLetter(m, handler, v, cause, d.cfg.Now()), m); err != nil {
				return err
			}
		}
		return d.release(ctx, m, handler)
	case DeadLetter, Park:
		return d.bury(ctx, m, handler, v, cause)
	default:
		return &UnsupportedError{Operation: "disposing by " + v.Action.String(), Needs: "a consumer that does it itself"}
	}
}

// immovableError says that a message cannot be moved where the policy wants it, now or ever: it is given up.
type immovableError struct{ why string }

func (e *immovableError) Error() string { return "it cannot be retried: " + e.why }

// move takes the message to another place. The gate is closed first: a message that is on its way without holding back
// those behind it would break their order.
func (d *MessageDisposer) move(ctx context.Context, m *Message, handler string, v Verdict) error {
	switch {
	case v.Action == Schedule && (d.cfg.Outbox == nil || d.cfg.Transact == nil):
		return &immovableError{"scheduling needs an Outbox"}
	case v.Action != Schedule && d.cfg.Publisher == nil:
		return &immovableError{"it needs a Publisher"}
	case v.Block && d.cfg.Gate == nil:
		return &immovableError{"BlockKey needs a KeyGate"}
	case v.Block:
		if err := d.cfg.Gate.appendWaiter(ctx, m, handler); err != nil {
			return err
		}
	}
	if v.Action == Schedule {
		return d.schedule(ctx, m, handler, v)
	}
	topic, due := originOf(m).Topic, time.Time{}
	if v.Action == RetryTopic {
		topic = v.Topic
	}
	if v.Delay > 0 && v.Action == RetryTopic {
		due = d.cfg.Now().Add(v.Delay)
	}
	err := d.publish(ctx, topic, originOf(m).Topic, moved(m, handler, v, due))
	switch {
	case tooLarge(err):
		return &immovableError{"with its retry headers it is larger than topic " + topic + " allows"}
	case refused(err):
		return &immovableError{err.Error()}
	}
	return err
}

// publish writes to a topic, and creates it if it is missing and may be created.
func (d *MessageDisposer) publish(ctx context.Context, topic, like string, m *Message) error {
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
		return fmt.Errorf("publishing to %s (it has to exist, and the user must be allowed to write to it): %w", topic, err)
	}
	return nil
}

// refused reports whether a topic takes no record until somebody changes the cluster: it does not exist, its name is not
// legal, or this user may not write to it.
func refused(err error) bool {
	for _, code := range []kafka.Error{kafka.UnknownTopicOrPartition, kafka.InvalidTopic, kafka.TopicAuthorizationFailed} {
		if errors.Is(err, code) {
			return true
		}
	}
	return false
}

// tooLarge reports whether Kafka refuses a record for its size, which it will always do.
func tooLarge(err error) bool {
	if _, ok := errors.AsType[kafka.MessageTooLargeError](err); ok {
		return true
	}
	return errors.Is(err, kafka.MessageSizeTooLarge)
}

// schedule appends the message to the outbox as an event that comes back to its topic. Its id names the record that it was
// read from, so that doing it again changes nothing, while the next failure, of the record that came back, is another event.
func (d *MessageDisposer) schedule(ctx context.Context, m *Message, handler string, v Verdict) error {
	due := d.cfg.Now().Add(v.Delay)
	err := d.append(ctx, comeback(moved(m, handler, v, time.Time{}), handler, due))
	if errors.Is(err, ErrUnfit) {
		return &immovableError{err.Error()}
	}
	return err
}

// append stores one event in a transaction of its own; one that is there already is fine.
func (d *MessageDisposer) append(ctx context.Context, ev event.Event) error {
	err := d.cfg.Transact(ctx, func(ctx context.Context) error {
		return d.cfg.Outbox.AppendMany(ctx, []event.Event{ev})
	})
	switch {
	case mongo.IsDuplicateKeyError(err):
		return nil
	case errors.Is(err, event.ErrInvalid), errors.Is(err, outbox.ErrTooLarge):
		return fmt.Errorf("%w: %w", ErrUnfit, err)
	}
	return err
}

// comeback is a message as a scheduled event. The names of headers that the outbox keeps for itself are disguised, until
// restored makes them what they were.
func comeback(m *Message, handler string, due time.Time) event.Event {
	id := boundIdentity(fmt.Sprintf("retry/%s/%s/%s/%s/%d/%s/%d/%d", m.Group, handler, m.Namespace, m.ID, m.Delivery, m.Topic, m.Partition, m.Offset))
	origin := originOf(m)
	opts := []event.Option{event.WithTopic(origin.Topic), event.WithDueAt(due), event.WithID(id)}
	if len(m.Key) > 0 {
		opts = append(opts, event.WithKey(string(m.Key)))
	} else {
		opts = append(opts, event.WithHeader(headerNoKey, []byte("true")))
	}
	if m.ContentType != "" {
		opts = append(opts, event.WithContentType(m.ContentType))
	}
	if m.SchemaVersion != "" {
		opts = append(opts, event.WithSchemaVersion(m.SchemaVersion))
	}
	structured := isStructured(m.Headers)
	if structured { // the relay wraps what is inside
		if inner, err := Decode(&Record{Topic: m.Topic, Key: m.Key, Value: m.Value, Headers: m.Headers}); err == nil {
			m.Value = inner.Value
		}
	}
	for _, h := range m.Headers {
		name := h.Key
		switch {
		case reserved(name) || byPreset[name] && !structured:
			name = headerKept + name
		case byPreset[name]:
			continue // the relay writes it anew
		}
		opts = append(opts, event.WithHeader(name, h.Value))
	}
	if !structured {
		opts = append(opts, event.WithHeader(headerAsItWas, []byte("true")))
	}
	var payload any
	if m.Value != nil {
		payload = m.Value
	}
	return event.New(cmp.Or(m.AggregateType, "retry"), cmp.Or(m.AggregateID, m.ID), cmp.Or(m.Type, "retry"), payload, opts...)
}

// byPreset are headers that the relay writes from the event's own fields.
var byPreset = map[string]bool{
	record.HeaderType: true, record.HeaderAggregateType: true, record.HeaderAggregateID: true, record.HeaderContentType: true, record.HeaderSchemaVersion: true,
	record.HeaderCESpecVersion: true, record.HeaderCEID: true, record.HeaderCESource: true, record.HeaderCEType: true, record.HeaderCESubject: true, record.HeaderCETime: true, record.HeaderCESchemaVersion: true,
	record.HeaderHTTPContentType: true,
}

// bury makes a dead letter: the topic first, then the document, then the word to others, then the gate.
func (d *MessageDisposer) bury(ctx context.Context, m *Message, handler string, v Verdict, cause error) error {
	if v.Action == Park {
		v.Reason = cmp.Or(v.Reason, ClassNoHandler)
	}
	if only, ok := m.Header(HeaderOnly); ok && handler == "" { // it was for one that is no more
		if name, ok := strings.CutPrefix(string(only), m.Group+"/"); ok {
			handler = name
		}
	}
	l := newLetter(m, handler, v, cause, d.cfg.Now())
	if v.Bare {
		l.stripContent()
	} else if err := d.redact(ctx, l); err != nil {
		if errors.Is(err, ErrDrop) {
			return d.release(ctx, m, handler)
		}
		return fmt.Errorf("redacting: %w", err)
	}

	if err := d.buryInTopic(ctx, l, v); err != nil {
		return err
	}
	if d.cfg.Letters != nil {
		if err := d.cfg.Letters.Put(ctx, l); err != nil {
			return err
		}
	}
	if v.Action != Park && !v.Bare {
		if err := d.publishLetterFault(ctx, l, m); err != nil {
			return err
		}
	}
	return d.release(ctx, m, handler)
}

// redact changes the letter by the functions that a user gave. Whatever goes wrong in one of them goes wrong for the letter.
func (d *MessageDisposer) redact(ctx context.Context, l *Letter) (err error) {
	defer recoverPanic(&err)
	for _, r := range d.cfg.Redact {
		if err := r(ctx, l); errors.Is(err, ErrDrop) {
			return err
		} else if err != nil {
			return fmt.Errorf("%w: %w", ErrUnfit, err)
		}
	}
	return nil
}

func (d *MessageDisposer) buryInTopic(ctx context.Context, l *Letter, v Verdict) error {
	var topic string
	switch {
	case v.Topic != "" && v.Action == DeadLetter && d.cfg.Publisher != nil:
		topic = v.Topic
	case d.cfg.DeadTopic != nil:
		topic = d.cfg.DeadTopic(l.Topic, l.ID.Group)
	default:
		return nil
	}
	err := d.publish(ctx, topic, l.Topic, l.deadTopicRecord())
	switch {
	case (tooLarge(err) || refused(err)) && d.cfg.Letters != nil:
		d.report(fmt.Errorf("dead letter %s is in the collection alone: %w", l.ID, err))
		return nil
	case tooLarge(err):
		return fmt.Errorf("%w: %w", ErrUnfit, err)
	}
	return err
}

// release lets those pass that were kept behind the message.
func (d *MessageDisposer) release(ctx context.Context, m *Message, handler string) error {
	if d.cfg.Gate == nil {
		return nil
	}
	return d.cfg.Gate.removeWaiter(ctx, m, handler)
}
