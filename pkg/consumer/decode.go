package consumer

import (
	"bytes"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"
)

// The headers that the relay writes, in all of its presets and in each of them. Debezium's event router leaves the name of
// the header with the type to its configuration; these are the usual ones.
const (
	HeaderID          = "id"
	HeaderIDType      = "outrelay-id-type"
	HeaderNamespace   = "outrelay-ns"
	HeaderDelivery    = "outrelay-delivery"
	HeaderRedelivered = "outrelay-redelivered"
	HeaderOnly        = "outrelay-only"
	HeaderAttempt     = "outrelay-attempt" // of the retry topics: how often it was tried before
)

// maxIdentity is the longest id and namespace in bytes. An inbox accepts no longer ones, and the relay sends none.
const maxIdentity = 1024

// boundIdentity returns the text, or its digest if the text is longer than an identity may be.
func boundIdentity(text string) string {
	if len(text) <= maxIdentity {
		return text
	}
	return fmt.Sprintf("sha256:%x", sha256.Sum256([]byte(text)))
}

// Decoder makes a Message of a record. It may keep the record's bytes. An error makes the record poison: it meets the
// policy as a *DecodeError, by default a dead letter, and its offset passes after that was written. What the Decoder leaves
// empty of Topic, Partition, Offset, LeaderEpoch, Time, ID, Attempt and Group is filled in.
type Decoder func(r *Record) (*Message, error)

// DecodeError says that a record could not be decoded.
type DecodeError struct {
	Topic     string
	Partition int32
	Offset    int64
	Err       error
}

func (e *DecodeError) Error() string {
	return fmt.Sprintf("record %s/%d/%d is not readable: %v", e.Topic, e.Partition, e.Offset, e.Err)
}

// Unwrap is the cause.
func (e *DecodeError) Unwrap() error { return e.Err }

// Decode is the default Decoder. It knows the records of all three presets of the relay by their headers: plain, Debezium's
// event router, and CloudEvents, binary and structured; of a structured one the value becomes the event's data. A CloudEvent's
// id is unique only together with its source, so the source is the namespace of an event that does not have the relay's.
func Decode(r *Record) (*Message, error) {
	m := newMessage(r)
	structured, source := false, ""
	for i := range r.Headers {
		h := &r.Headers[i]
		v := string(h.Value)
		switch h.Key {
		case HeaderID:
			setIfEmpty(&m.ID, v)
		case HeaderNamespace:
			setIfEmpty(&m.Namespace, hex.EncodeToString(h.Value))
		case HeaderDelivery:
			n, err := strconv.Atoi(v)
			if err != nil || n < 0 {
				return nil, errors.New("header " + HeaderDelivery + " is not a number")
			}
			m.Delivery = n
		case HeaderRedelivered:
			m.Redelivered = v == "true"
		case HeaderAttempt:
			n, err := strconv.Atoi(v)
			if err != nil || n < 1 {
				return nil, errors.New("header " + HeaderAttempt + " is not a positive number")
			}
			m.Attempt = n
		case "ce_id":
			setIfEmpty(&m.ID, v)
		case "ce_source":
			setIfEmpty(&source, v)
		case "type", "ce_type", "eventType":
			setIfEmpty(&m.Type, v)
		case "aggregatetype":
			setIfEmpty(&m.AggregateType, v)
		case "aggregateid":
			setIfEmpty(&m.AggregateID, v)
		case "contenttype", "content-type":
			structured = structured || strings.HasPrefix(v, "application/cloudevents+json")
			setIfEmpty(&m.ContentType, v)
		case "schemaversion", "ce_schemaversion":
			setIfEmpty(&m.SchemaVersion, v)
		}
	}
	if structured && r.Value != nil {
		if err := unwrapCloudEvent(m, &source); err != nil {
			return nil, err
		}
	}
	setIfEmpty(&m.Namespace, boundIdentity(source))
	if m.AggregateID == "" {
		m.AggregateID = string(r.Key)
	}
	return m, nil
}

// setIfEmpty keeps the first of repeated headers.
func setIfEmpty(to *string, v string) {
	if *to == "" {
		*to = v
	}
}

func newMessage(r *Record) *Message {
	return &Message{
		Topic: r.Topic, Partition: r.Partition, Offset: r.Offset, LeaderEpoch: r.LeaderEpoch, Time: r.Time,
		Key: r.Key, Value: r.Value, Headers: r.Headers,
	}
}

// unwrapCloudEvent takes the payload and the source out of a structured CloudEvent.
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
	m.Type, m.ContentType, m.SchemaVersion = e.Type, e.DataContentType, e.SchemaVersion
	switch {
	case e.Base64 != nil:
		data, err := base64.StdEncoding.DecodeString(*e.Base64)
		if err != nil {
			return fmt.Errorf("structured CloudEvent: data_base64: %w", err)
		}
		m.Value = data
	case len(e.Data) > 0 && e.Data[0] == '"' && !isJSON(e.DataContentType):
		var text string
		if err := json.Unmarshal(e.Data, &text); err != nil {
			return fmt.Errorf("structured CloudEvent: data: %w", err)
		}
		m.Value = []byte(text)
	default:
		m.Value = append([]byte{}, bytes.TrimSpace(e.Data)...)
	}
	return nil
}

func isJSON(contentType string) bool {
	t, _, _ := strings.Cut(contentType, ";")
	t = strings.TrimSpace(t)
	return t == "" || t == "application/json" || strings.HasSuffix(t, "+json")
}

// checkIdentity reports an id or a namespace that is too long to be an identity: the message could be neither handled once nor
// kept under its id.
func checkIdentity(m *Message) error {
	if n := max(len(m.ID), len(m.Namespace)); n > maxIdentity {
		return fmt.Errorf("its id or namespace has %d bytes; at most %d are possible", n, maxIdentity)
	}
	return nil
}

// completeMessage fills in what every message has, whatever the Decoder was.
//
// The identity of a record without an id is its place and its timestamp: the same place of a topic that was deleted and
// created again holds another message, and the identity stays the same when the record is moved to another topic.
func completeMessage(m *Message, r *Record, group string) *Message {
	m.Topic, m.Partition, m.Offset, m.LeaderEpoch = r.Topic, r.Partition, r.Offset, r.LeaderEpoch
	if m.Time.IsZero() {
		m.Time = r.Time
	}
	if m.ID == "" {
		m.ID = fmt.Sprintf("%s/%d/%d@%d", r.Topic, r.Partition, r.Offset, r.Time.UnixMilli())
	}
	if _, ok := m.Header(HeaderID); !ok { // so that it keeps its id wherever it is moved to
		m.Headers = append([]Header{{Key: HeaderID, Value: []byte(m.ID)}}, m.Headers...)
	}
	m.Attempt = max(m.Attempt, 1)
	m.Group = group
	return m
}

// identity is the id by which an inbox knows the message. Two equal texts of different types of id are two events.
func identity(m *Message) string {
	if kind, ok := m.Header(HeaderIDType); ok {
		return string(kind) + ":" + m.ID
	}
	return m.ID
}
