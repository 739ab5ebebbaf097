package consumer

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/kafkawire"
	"github.com/outrelay/outrelay/internal/service/transport"
	"github.com/outrelay/outrelay/pkg/consumer/deadletter"
)

// disposer carries out the verdict on a message that is not handled now. Dispose returns nil only after its last write is
// acknowledged by all in-sync replicas of Kafka or by a majority of MongoDB. So the message's offset is committed only then.
// After a crash in between, Dispose is called again. Of two copies in a retry topic, the inbox rejects the second. Letters get
// the same id again.
type disposer struct {
	letters   *deadletter.Desk
	publisher transport.Publisher
	// report is called after a partial success, for example for a letter that is stored without its content.
	report func(message string, err error, attrs ...any)
}

// Dispose implements messageDisposer. A message that cannot be moved becomes a dead letter.
func (d *disposer) Dispose(ctx context.Context, message *Message, handler string, verdict verdict, cause error) (givenUp *GivenUp, err error) {
	switch verdict.Action {
	case actRetryTopic:
		err = d.moveToRetryTopic(ctx, message, handler, verdict)
		// A message that does not fit its retry topic must not be lost, and not be repeated forever either.
		if why, ok := errors.AsType[*immovableError](err); ok {
			givenUp, err = d.putLetter(ctx, newLetter(message, handler, verdict, errors.Join(cause, why)))
		}
	case actDeadLetter:
		// A message for one handler, which does not exist any more, keeps the name of that handler.
		if only, ok := message.Header(record.HeaderOnly); ok && handler == "" {
			if name, ok := strings.CutPrefix(string(only), message.Group+"/"); ok {
				handler = name
			}
		}
		givenUp, err = d.putLetter(ctx, newLetter(message, handler, verdict, cause))
	default:
	}

	if err != nil {
		return nil, fmt.Errorf("disposing of message %s (%s) by %s: %w", record.Clip(message.ID, maxReason), originOf(message), verdict.Action, err)
	}
	return givenUp, nil
}

// immovableError reports that a message can never be moved to its retry topic. The message is given up.
type immovableError struct{ why string }

func (e *immovableError) Error() string { return "it cannot be retried: " + e.why }

// moveToRetryTopic moves the message to the topic of verdict.
func (d *disposer) moveToRetryTopic(ctx context.Context, message *Message, handler string, verdict verdict) error {
	retried := newRetryMessage(message, handler, verdict, time.Now().Add(verdict.Delay))
	err := d.publishMessage(ctx, verdict.Topic, originOf(message).Topic, verdict.Delay+retryRetention, retried)
	switch {
	case isTooLarge(err):
		return &immovableError{"with its retry headers it is larger than topic " + verdict.Topic + " allows"}
	case isTopicUnavailable(err):
		return &immovableError{err.Error()}
	}
	return err
}

// errNotVisibleYet replaces the code of the brokers for a topic that was just created, because that code would give the message up.
var errNotVisibleYet = errors.New("the topic is new, and brokers do not show it yet")

// publishMessage writes message to a topic. If the topic is missing, it creates the topic like the topic like, whose records stay for the
// time keep; 0 is the default of the brokers.
func (d *disposer) publishMessage(ctx context.Context, topic, like string, keep time.Duration, message *Message) error {
	type creator interface {
		CreateTopic(ctx context.Context, name, like string, keep time.Duration) error
	}

	err := d.publisher.Publish(ctx, topic, []transport.Record{recordOf(message)})
	if creator, ok := d.publisher.(creator); ok && errors.Is(err, kafkawire.UnknownTopicOrPartition) {
		if err := creator.CreateTopic(ctx, topic, like, keep); err != nil {
			return err
		}
		err = d.publisher.Publish(ctx, topic, []transport.Record{recordOf(message)})
		if errors.Is(err, kafkawire.UnknownTopicOrPartition) {
			return fmt.Errorf("publishing to topic %s: %w", topic, errNotVisibleYet)
		}
	}
	if err != nil {
		return fmt.Errorf("publishing to %s (the topic must exist, and the user must be allowed to write to it): %w", topic, err)
	}
	return nil
}

// isTopicUnavailable reports whether a topic accepts no record until an administrator changes the
// cluster: the topic does not exist, its name is illegal, this user may not write to it, or the cluster rejects the settings with which
// it would be created.
func isTopicUnavailable(err error) bool {
	for _, code := range []kafkawire.Code{
		kafkawire.UnknownTopicOrPartition, kafkawire.InvalidTopic, kafkawire.TopicAuthorizationFailed,
		kafkawire.PolicyViolation, kafkawire.InvalidConfig,
	} {
		if errors.Is(err, code) {
			return true
		}
	}
	return false
}

// isTooLarge reports whether Kafka rejects a record for its size. It would reject the record each time.
func isTooLarge(err error) bool { return errors.Is(err, kafkawire.MessageTooLarge) }
