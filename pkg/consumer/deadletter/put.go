package deadletter

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"slices"

	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/base/module"
	"github.com/outrelay/outrelay/pkg/event"
	"github.com/outrelay/outrelay/pkg/outbox"
)

// Put stores letter, unless a letter with its id exists. It replaces only one of a handler that was requeued or discarded. It redacts the letter first, and calls publish if the
// letter also belongs in a topic. If err is nil, the letter cannot be lost any more. omitted is the reason why parts of it were
// left out. Consumers call it. Others cannot name its key.
func (d *Desk) Put(
	ctx context.Context, _ module.Key, letter *Letter, publish func(ctx context.Context, topic string) error,
) (omitted, err error) {
	// The letter of a notification must not lead to another notification.
	isNotification := slices.ContainsFunc(letter.Headers, func(header event.Header) bool { return header.Key == headerNotification })
	// The redaction comes first, so neither the topic nor the store gets the hidden values.
	if omitted = d.redactLetter(ctx, letter); omitted != nil {
		letter.omitContent(omitted)
	}
	letter.Size = len(letter.Value)

	// A crash after the record repeats it, which a topic tolerates.
	if d.hasTopic {
		topic := d.topic
		if topic == "" {
			topic = letter.ID.Topic + "." + letter.ID.Group + ".dead"
		}
		if err := publish(ctx, topic); err != nil {
			return omitted, err
		}
	}

	err = d.store.Put(ctx, letter)
	if errors.Is(err, errTooLarge) {
		// Without its content, the letter still shows that the message was given up.
		omitted = err
		letter.omitContent(err)
		letter.Size = 0
		err = d.store.Put(ctx, letter)
	}
	if err != nil || d.box == nil || isNotification {
		return omitted, err
	}

	err = d.notify(ctx, letter)
	if errors.Is(err, event.ErrInvalid) || errors.Is(err, outbox.ErrTooLarge) {
		// It would be rejected each time.
		return errors.Join(omitted, err), nil
	}
	return omitted, err
}

// redactLetter calls the functions of WithRedaction. It returns a panic as an error.
func (d *Desk) redactLetter(ctx context.Context, letter *Letter) (err error) {
	defer func() {
		if panicked := recover(); panicked != nil {
			err = fmt.Errorf("redacting dead letter %s: panic: %v", letter.ID, panicked)
		}
	}()
	for _, f := range d.redact {
		if err := f(ctx, letter); err != nil {
			return fmt.Errorf("redacting dead letter %s: %w", letter.ID, err)
		}
	}
	return nil
}

// Notification is the payload of the events of WithNotification.
type Notification struct {
	ID       ID     `json:"id"`
	Class    string `json:"class"`
	Reason   string `json:"reason"`
	Name     string `json:"name"` // of the event that was given up
	Attempts int    `json:"attempts"`
}

// Notified is the type of the events of WithNotification. Handle them with consumer.For.
var Notified = event.Type[Notification]{Aggregate: "dead-letter", Name: "DeadLetter"}

// headerNotification marks notifications, so that there is no notification of another one.
const headerNotification = "dead-letter"

// notify appends the notification of a letter. Its id comes from the letter, so a repetition appends nothing.
func (d *Desk) notify(ctx context.Context, letter *Letter) error {
	n := Notification{ID: letter.ID, Class: letter.Class, Reason: letter.Reason, Name: letter.Name, Attempts: letter.Attempts}
	digest := fmt.Sprintf("dead-letter/%x", sha256.Sum256([]byte(letter.ID.String())))
	ev := Notified.New(digest, n, event.WithID(digest), event.WithHeader(headerNotification, []byte(letter.ID.Group)))

	// In the transaction of ctx, the duplicate key of a repetition would abort it each time. A service may only insert into its outbox,
	// so it cannot look first.
	err := d.box.Transaction(outbox.Outside(ctx), func(ctx context.Context) error { return d.box.Append(ctx, ev) })
	if err != nil && !mongo.IsDuplicateKeyError(err) {
		return fmt.Errorf("appending the notification of dead letter %s: %w", letter.ID, err)
	}
	return nil
}
