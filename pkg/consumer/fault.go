package consumer

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	"github.com/outrelay/outrelay/internal/envelope"
	"github.com/outrelay/outrelay/internal/record"
	"github.com/outrelay/outrelay/internal/transport"
	"github.com/outrelay/outrelay/pkg/event"
)

// FaultType is the aggregate type of fault events, and the prefix of their type: "fault.<type of the message>".
const FaultType = "fault"

// Fault describes a message that was given up. It is published as JSON.
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

// Faults configures the fault events of messages that are given up. Every dead letter has a fault event. A fault event that
// is given up itself has none, regardless of which service published it.
type Faults struct {
	// Discarded also publishes fault events for messages that are discarded.
	Discarded bool
	// NotExpired leaves out messages that expired.
	NotExpired bool
	// Body adds the body of the record.
	Body bool
	// Topic publishes the events to this topic without the outbox. By default they go through the outbox, with the
	// aggregate type "fault".
	Topic string
	// Redact may change the event before it is published. If it returns false, the event is not published. May be nil.
	Redact func(f *Fault) bool
}

// maxFaultText is the maximum length of the type and of the key of a message in its fault event, in bytes.
const maxFaultText = 1024

// publishLetterFault publishes the fault event of a letter, if the settings require one. The id of the event comes from the
// letter, so a repetition publishes the same event. If the event can never be published, it is only reported, because the
// letter is already written.
func (d *disposer) publishLetterFault(ctx context.Context, l *Letter, m *Message) error {
	cfg := d.cfg.Faults
	if cfg == nil {
		return nil
	}
	if _, isFault := m.Header(headerFaultOf); isFault {
		return nil
	}
	if l.Class == ClassExpired && cfg.NotExpired {
		return nil
	}

	f := &Fault{
		ID:        l.ID.ID,
		Namespace: l.ID.NS,
		Type:      clip(l.Type, maxFaultText),
		Key:       clip(string(l.Key), maxFaultText),
		Group:     l.ID.Group,
		Handler:   l.ID.Handler,
		Origin:    l.Origin,
		Class:     l.Class,
		Reason:    clip(l.Reason, maxReason),
		Attempts:  l.Attempts,
		At:        l.LastFailure,
	}
	if cfg.Body {
		f.Body = l.Value
	}

	wanted, err := redactFault(cfg, f)
	if err == nil && wanted {
		err = d.publishFault(ctx, f, l)
	}

	// The body may be the reason why the event cannot be published.
	if isUnfit(err) && f.Body != nil {
		f.Body = nil
		d.reportError(fmt.Errorf("the fault event of dead letter %s goes without the body: %w", l.ID, err))
		err = d.publishFault(ctx, f, l)
	}
	if isUnfit(err) {
		d.reportError(fmt.Errorf("dead letter %s has no fault event: %w", l.ID, err))
		return nil
	}
	return err
}

// redactFault calls Redact and reports whether the event is to be published. It returns a panic as an error.
func redactFault(cfg *Faults, f *Fault) (wanted bool, err error) {
	defer recoverPanic(&err)
	return cfg.Redact == nil || cfg.Redact(f), nil
}

// publishFault appends the fault event to the outbox, or writes it to Faults.Topic.
func (d *disposer) publishFault(ctx context.Context, f *Fault, l *Letter) error {
	cfg := d.cfg.Faults
	body, err := json.Marshal(f)
	if err != nil {
		return fmt.Errorf("fault event: %w", err)
	}

	letterID := l.ID.String()
	ev := event.New(event.Aggregate{Type: FaultType, ID: faultKey(l)}, FaultType+"."+f.Type, event.Bytes("application/json", body),
		event.WithID(boundIdentity("fault/"+letterID)),
		event.WithHeader(headerFaultOf, []byte(letterID)))

	if cfg.Topic == "" {
		if err := d.appendEvent(ctx, ev); err != nil {
			return fmt.Errorf("fault event: %w", err)
		}
		return nil
	}

	msg, err := directMessage(ev)
	if err != nil {
		return err
	}
	if err := d.cfg.Publisher.Publish(ctx, cfg.Topic, []transport.Record{recordOf(msg)}); err != nil {
		if isTooLarge(err) || isTopicUnavailable(err) {
			err = fmt.Errorf("%w: %w", ErrUnfit, err)
		}
		return fmt.Errorf("fault event: publishing to %s: %w", cfg.Topic, err)
	}
	return nil
}

// faultKey returns the key of a fault event, so that the faults of one key stay in order. If the message has no key, or its
// key is not valid UTF-8, the key is the id of the message.
func faultKey(l *Letter) string {
	key := clip(string(l.Key), len(l.Key))
	if key != "" && len(key) == len(l.Key) {
		return boundIdentity(key)
	}
	return boundIdentity(l.ID.ID)
}

// directMessage returns the event as the relay would write it.
func directMessage(ev event.Event) (*Message, error) {
	raw, err := ev.MarshalBSON()
	var v envelope.View
	if err == nil {
		err = envelope.Parse(raw, &v)
	}
	if err != nil {
		return nil, fmt.Errorf("event %s: %w", ev.ID(), err)
	}
	if v.HasDueAt {
		return nil, &unsupportedError{
			Operation: "PublishDirect of a scheduled event",
			Needs:     "the outbox: use Schedule",
		}
	}

	body, err := ev.Payload()
	if err != nil {
		return nil, fmt.Errorf("event %s: %w", ev.ID(), err)
	}

	m := &Message{
		ID:            ev.ID().String(),
		Name:          ev.Name(),
		Aggregate:     ev.Aggregate(),
		ContentType:   ev.ContentType(),
		SchemaVersion: string(v.SchemaVersion),
		Key:           []byte(ev.Key()),
		Value:         body,
	}
	for _, h := range []event.Header{
		{Key: HeaderID, Value: []byte(m.ID)},
		{Key: "type", Value: []byte(m.Name)},
		{Key: record.HeaderAggregateType, Value: []byte(m.Aggregate.Type)},
		{Key: record.HeaderAggregateID, Value: []byte(m.Aggregate.ID)},
		{Key: record.HeaderContentType, Value: []byte(m.ContentType)},
		{Key: record.HeaderSchemaVersion, Value: []byte(m.SchemaVersion)},
	} {
		if len(h.Value) > 0 {
			m.Headers = append(m.Headers, h)
		}
	}
	for _, h := range ev.Headers() {
		m.Headers = append(m.Headers, event.Header(h))
	}
	return m, nil
}
