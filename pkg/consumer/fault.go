package consumer

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	"github.com/outrelay/outrelay/pkg/event"
)

// FaultType is the aggregate type of fault events, and begins their type: "fault.<type of the message>".
const FaultType = "fault"

// Fault says that a message was given up, to whoever listens. It is published as JSON.
type Fault struct {
	ID        string    `json:"id"` // of the message
	Namespace string    `json:"namespace,omitempty"`
	Type      string    `json:"type"`
	Key       string    `json:"key,omitempty"`
	Group     string    `json:"group"`
	Handler   string    `json:"handler,omitempty"`
	Origin    Origin    `json:"origin"`
	Class     string    `json:"class"`
	Reason    string    `json:"reason,omitempty"`
	Attempts  int       `json:"attempts"`
	At        time.Time `json:"at"`
	Body      []byte    `json:"body,omitempty"` // base64; only with Faults.Body
}

// Faults says when a message that is given up becomes a fault event. Dead letters always do; no fault event is made of a
// fault event, whoever made it.
type Faults struct {
	// Discarded makes one also of messages that a policy lets pass unhandled.
	Discarded bool
	// NotExpired leaves out messages whose time was over.
	NotExpired bool
	// Body adds the body of the record.
	Body bool
	// Topic publishes to that topic, past the outbox. Defaults to an event of aggregate type "fault" through the outbox.
	Topic string
	// Redact may change the event before it is published; false keeps it from being so. May be nil.
	Redact func(f *Fault) bool
}

// maxFaultText bounds the type, the key and the id of a message in its fault event, in bytes.
const maxFaultText = 1024

// publishLetterFault publishes the fault of a letter. Its id is the letter's, so that doing it again changes nothing. The letter is
// written already, so a fault event that can never be published is reported, and nothing else.
func (d *MessageDisposer) publishLetterFault(ctx context.Context, l *Letter, m *Message) error {
	cfg := d.cfg.Faults
	if cfg == nil {
		return nil
	}
	if _, own := m.Header(headerFaultOf); own {
		return nil
	}
	if l.Class == ClassExpired && cfg.NotExpired {
		return nil
	}
	f := &Fault{
		ID: l.ID.ID, Namespace: l.ID.NS, Type: clip(l.Type, maxFaultText), Key: clip(string(l.Key), maxFaultText), Group: l.ID.Group, Handler: l.ID.Handler, Origin: l.Origin,
		Class: l.Class, Reason: clip(l.Reason, maxReason), Attempts: l.Attempts, At: l.LastFailure,
	}
	if cfg.Body {
		f.Body = l.Value
	}
	wanted, err := redactFault(cfg, f)
	if err == nil && wanted {
		err = d.publishFault(ctx, f, l)
	}
	if isUnfit(err) && f.Body != nil {
		f.Body = nil
		d.report(fmt.Errorf("the fault event of dead letter %s goes without the body: %w", l.ID, err))
		err = d.publishFault(ctx, f, l)
	}
	if isUnfit(err) {
		d.report(fmt.Errorf("dead letter %s has no fault event: %w", l.ID, err))
		return nil
	}
	return err
}

func redactFault(cfg *Faults, f *Fault) (wanted bool, err error) {
	defer recoverPanic(&err)
	return cfg.Redact == nil || cfg.Redact(f), nil
}

func (d *MessageDisposer) publishFault(ctx context.Context, f *Fault, l *Letter) error {
	cfg := d.cfg.Faults
	body, err := json.Marshal(f)
	if err != nil {
		return fmt.Errorf("fault event: %w", err)
	}
	of := l.ID.String()
	ev := event.New(FaultType, faultKey(l), FaultType+"."+f.Type, body, event.WithID(boundIdentity("fault/"+of)),
		event.WithHeader(headerFaultOf, []byte(of)), event.WithContentType("application/json"))
	if cfg.Topic == "" {
		if err := d.append(ctx, ev); err != nil {
			return fmt.Errorf("fault event: %w", err)
		}
		return nil
	}
	msg, err := directMessage(ev)
	if err != nil {
		return err
	}
	if err := d.cfg.Publisher.Publish(ctx, cfg.Topic, []*Message{msg}); err != nil {
		if tooLarge(err) || refused(err) {
			err = fmt.Errorf("%w: %w", ErrUnfit, err)
		}
		return fmt.Errorf("fault event: publishing to %s: %w", cfg.Topic, err)
	}
	return nil
}

// faultKey orders the faults of one key; a message without one, or with one that is no text, goes by its id.
func faultKey(l *Letter) string {
	if text := clip(string(l.Key), len(l.Key)); text != "" && len(text) == len(l.Key) {
		return boundIdentity(text)
	}
	return boundIdentity(l.ID.ID)
}
