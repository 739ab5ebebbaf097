package consumer

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"

	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/service/transport"
	"github.com/outrelay/outrelay/pkg/event"
)

// HeaderID is the header with the event's id, which the relay writes with every preset. Producers without a relay should set it:
// it identifies the message in the inbox.
const HeaderID = record.HeaderID

// maxIdentity is the maximum length of an id and of a namespace, in bytes. An inbox rejects longer ones, and the relay
// does not send them.
const maxIdentity = 1024

// boundIdentity returns the text, or its digest if the text is longer than maxIdentity.
func boundIdentity(text string) string {
	if len(text) <= maxIdentity {
		return text
	}
	return fmt.Sprintf("sha256:%x", sha256.Sum256([]byte(text)))
}

// wrapDecodeError returns err, with which a record could not be decoded, with the place of the record.
func wrapDecodeError(r *transport.Record, err error) error {
	return fmt.Errorf("record %s/%d/%d is not readable: %w", r.Topic, r.Partition, r.Offset, err)
}

// malformed returns an error that wraps ErrMalformed: another attempt would read the same bytes.
func malformed(format string, args ...any) error {
	return fmt.Errorf("%w: %w", ErrMalformed, fmt.Errorf(format, args...))
}

// Decode is the default decoder: it sets the fields of m that the headers contain. See WithDecoder. It accepts the records of all presets of the relay, and recognizes them by their headers:
// plain, Debezium's event router, and CloudEvents in binary and structured mode. For a structured CloudEvent, the value of
// the message is the data of the event. A relay's record whose headers name the type is never a structured CloudEvent, whatever content
// type the event has. The id of a CloudEvent is unique only together with its source, so the source is the
// namespace of an event without the relay's namespace header.
//
// Its errors wrap ErrMalformed. It does no I/O.
func Decode(_ context.Context, m *Message) error {
	// Of several headers with one meaning the first counts: the relay writes its own before those of the event.
	structured, fromRelay, source := false, false, ""
	for i := range m.Headers {
		h := &m.Headers[i]
		v := string(h.Value)
		switch h.Key {
		case HeaderID:
			setIfEmpty(&m.ID, v)
		case record.HeaderNamespace:
			fromRelay = true
			setIfEmpty(&m.Source, hex.EncodeToString(h.Value))
		case record.HeaderDelivery:
			n, err := strconv.Atoi(v)
			if err != nil || n < 0 {
				return malformed("header %s is not a number", record.HeaderDelivery)
			}
			m.Delivery = n
		case record.HeaderRedelivered:
			m.Redelivered = v == "true"
		case record.HeaderAttempt:
			n, err := strconv.Atoi(v)
			if err != nil || n < 1 {
				return malformed("header %s is not a positive number", record.HeaderAttempt)
			}
			m.Attempt = n
		case record.HeaderCEID:
			setIfEmpty(&m.ID, v)
		case record.HeaderCESource:
			setIfEmpty(&source, v)
		case record.HeaderType, record.HeaderCEType, "eventType":
			setIfEmpty(&m.Name, v)
		case record.HeaderAggregateType:
			setIfEmpty(&m.Aggregate.Type, v)
		case record.HeaderAggregateID:
			setIfEmpty(&m.Aggregate.ID, v)
		case record.HeaderContentType, record.HeaderHTTPContentType:
			// A relay writes the type of the event before anything that the event chooses, and in structured mode the content
			// type first. Otherwise a payload could replace the type by which its event got its topic.
			isFirst := m.Name == "" && m.ContentType == ""
			structured = structured || strings.HasPrefix(v, record.TypeCloudEvents) && (isFirst || !fromRelay)
			setIfEmpty(&m.ContentType, v)
		case record.HeaderSchemaVersion, record.HeaderCESchemaVersion:
			setIfEmpty(&m.SchemaVersion, v)
		}
	}

	if structured && m.Value != nil {
		if err := unwrapCloudEvent(m, &source); err != nil {
			return malformed("%w", err)
		}
	}

	// The relay's namespace has precedence over the source of a CloudEvent.
	setIfEmpty(&m.Source, boundIdentity(source))
	// The relay takes the aggregate id as key if an event has no key.
	if m.Aggregate.ID == "" {
		m.Aggregate.ID = string(m.Key)
	}
	return nil
}

// setIfEmpty sets field to v if it is empty, so that the first of repeated headers wins.
func setIfEmpty(field *string, v string) {
	if *field == "" {
		*field = v
	}
}

func newMessage(r *transport.Record) *Message {
	return &Message{
		Topic: r.Topic, Partition: r.Partition, Offset: r.Offset, LeaderEpoch: r.LeaderEpoch, Time: r.Time,
		Key: r.Key, Value: r.Value, Headers: r.Headers,
	}
}

// unwrapCloudEvent replaces the value of m, a structured CloudEvent, by the data of the event. It takes the id, the type and
// the source from the event too.
func unwrapCloudEvent(m *Message, source *string) error {
	var e struct {
		ID              string          `json:"id"`
		Source          string          `json:"source"`
		Type            string          `json:"type"`
		DataContentType string          `json:"datacontenttype"`
		SchemaVersion   string          `json:"schemaversion"`
		Data            json.RawMessage `json:"data"`
		Base64          *string         `json:"data_base64"`
	}
	if err := json.Unmarshal(m.Value, &e); err != nil {
		return fmt.Errorf("structured CloudEvent: %w", err)
	}
	if e.Type == "" {
		return errors.New("structured CloudEvent without a type")
	}

	setIfEmpty(&m.ID, e.ID)
	setIfEmpty(source, e.Source)
	m.Name, m.ContentType, m.SchemaVersion = e.Type, e.DataContentType, e.SchemaVersion

	// JSON holds a text as a string. The value of the message is the text.
	isText := len(e.Data) > 0 && e.Data[0] == '"' && !isJSON(e.DataContentType)
	switch {
	case e.Base64 != nil:
		data, err := base64.StdEncoding.DecodeString(*e.Base64)
		if err != nil {
			return fmt.Errorf("structured CloudEvent: data_base64: %w", err)
		}
		m.Value = data
	case isText:
		var text string
		if err := json.Unmarshal(e.Data, &text); err != nil {
			return fmt.Errorf("structured CloudEvent: data: %w", err)
		}
		m.Value = []byte(text)
	default:
		// Missing data is an empty value, because nil would be a tombstone.
		m.Value = append([]byte{}, bytes.TrimSpace(e.Data)...)
	}
	return nil
}

func isJSON(contentType string) bool {
	t, _, _ := strings.Cut(contentType, ";")
	t = strings.TrimSpace(t)
	return t == "" || t == "application/json" || strings.HasSuffix(t, "+json")
}

// checkIdentity returns an error if the id or the namespace is too long. The inbox could not mark such a message, and no
// dead letter could have its id.
func checkIdentity(m *Message) error {
	if n := max(len(m.ID), len(m.Source)); n > maxIdentity {
		return malformed("the id or namespace has %d bytes: at most %d are allowed", n, maxIdentity)
	}
	return nil
}

// completeMessage fills in the fields that every message has with any decoder.
//
// A record without an id is identified by its place and its timestamp. With the timestamp, a record at the same place of a
// topic that was deleted and created again has another identity. The identity stays the same when the record is moved to
// another topic.
func completeMessage(m *Message, r *transport.Record, group string) *Message {
	m.Topic, m.Partition, m.Offset, m.LeaderEpoch = r.Topic, r.Partition, r.Offset, r.LeaderEpoch
	if m.Time.IsZero() {
		m.Time = r.Time
	}
	if m.ID == "" {
		m.ID = fmt.Sprintf("%s/%d/%d@%d", r.Topic, r.Partition, r.Offset, r.Time.UnixMilli())
	}

	// With the header, the message keeps its id when it is moved to another topic.
	if _, ok := m.Header(HeaderID); !ok {
		m.Headers = append([]event.Header{{Key: HeaderID, Value: []byte(m.ID)}}, m.Headers...)
	}

	m.Attempt = max(m.Attempt, 1)
	m.Group = group
	return m
}

// identity returns the id of the message in the inbox. It includes the type of the id, because ids of different types can
// have the same text.
func identity(m *Message) string {
	if kind, ok := m.Header(record.HeaderIDType); ok {
		return string(kind) + ":" + m.ID
	}
	return m.ID
}
