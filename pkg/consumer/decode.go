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
	return fmt.Sprintf("%s%x", prefixDigest, sha256.Sum256([]byte(text)))
}

// wrapDecodeError returns err, with which a record could not be decoded, with the place of the record.
func wrapDecodeError(record *transport.Record, err error) error {
	return fmt.Errorf("record %s is not readable: %w", recordPlace{record.Topic, record.Partition, record.Offset}, err)
}

// malformed returns an error that wraps ErrMalformed: another attempt would read the same bytes.
func malformed(format string, args ...any) error {
	return fmt.Errorf("%w: %w", ErrMalformed, fmt.Errorf(format, args...))
}

// Decode is the default decoder: it sets the fields of message that the headers contain. See WithDecoder. It accepts the records of all presets of the relay, and recognizes them by their headers:
// plain, Debezium's event router, and CloudEvents in binary and structured mode. For a structured CloudEvent, the value of
// the message is the data of the event. A relay's record whose headers name the type is never a structured CloudEvent, whatever content
// type the event has. The id of a CloudEvent is unique only together with its source, so the source is the
// namespace of an event without the relay's namespace header.
//
// Its errors wrap ErrMalformed. It does no I/O.
func Decode(_ context.Context, message *Message) error {
	// Of several headers with one meaning the first counts: the relay writes its own before those of the event.
	structured, fromRelay, source := false, false, ""
	for i := range message.Headers {
		header := &message.Headers[i]
		value := string(header.Value)
		switch header.Key {
		case HeaderID:
			setIfEmpty(&message.ID, value)
		case record.HeaderNamespace:
			fromRelay = true
			setIfEmpty(&message.Source, hex.EncodeToString(header.Value))
		case record.HeaderDelivery:
			n, err := strconv.Atoi(value)
			if err != nil || n < 0 {
				return malformed("header %s is not a number", record.HeaderDelivery)
			}
			message.Delivery = n
		case record.HeaderRedelivered:
			message.Redelivered = value == "true"
		case record.HeaderAttempt:
			n, err := strconv.Atoi(value)
			if err != nil || n < 1 {
				return malformed("header %s is not a positive number", record.HeaderAttempt)
			}
			message.Attempt = n
		case record.HeaderCEID:
			setIfEmpty(&message.ID, value)
		case record.HeaderCESource:
			setIfEmpty(&source, value)
		case record.HeaderType, record.HeaderCEType, "eventType":
			setIfEmpty(&message.Name, value)
		case record.HeaderAggregateType:
			setIfEmpty(&message.Aggregate.Type, value)
		case record.HeaderAggregateID:
			setIfEmpty(&message.Aggregate.ID, value)
		case record.HeaderContentType, record.HeaderHTTPContentType:
			// A relay writes the type of the event before anything that the event chooses, and in structured mode the content
			// type first. Otherwise a payload could replace the type by which its event got its topic.
			isFirst := message.Name == "" && message.ContentType == ""
			structured = structured || strings.HasPrefix(value, record.TypeCloudEvents) && (isFirst || !fromRelay)
			setIfEmpty(&message.ContentType, value)
		case record.HeaderSchemaVersion, record.HeaderCESchemaVersion:
			setIfEmpty(&message.SchemaVersion, value)
		}
	}

	if structured && message.Value != nil {
		if err := unwrapCloudEvent(message, &source); err != nil {
			return malformed("%w", err)
		}
	}

	// The relay's namespace has precedence over the source of a CloudEvent.
	setIfEmpty(&message.Source, boundIdentity(source))
	// The relay takes the aggregate id as key if an event has no key.
	if message.Aggregate.ID == "" {
		message.Aggregate.ID = string(message.Key)
	}
	return nil
}

// setIfEmpty sets field to value if it is empty, so that the first of repeated headers wins.
func setIfEmpty(field *string, value string) {
	if *field == "" {
		*field = value
	}
}

func newMessage(record *transport.Record) *Message {
	return &Message{
		Topic: record.Topic, Partition: record.Partition, Offset: record.Offset, LeaderEpoch: record.LeaderEpoch, Time: record.Time,
		Key: record.Key, Value: record.Value, Headers: record.Headers,
	}
}

// unwrapCloudEvent replaces the value of message, a structured CloudEvent, by the data of the event. It takes the id, the type and
// the source from the event too.
func unwrapCloudEvent(message *Message, source *string) error {
	var cloudEvent struct {
		ID              string          `json:"id"`
		Source          string          `json:"source"`
		Type            string          `json:"type"`
		DataContentType string          `json:"datacontenttype"`
		SchemaVersion   string          `json:"schemaversion"`
		Data            json.RawMessage `json:"data"`
		Base64          *string         `json:"data_base64"`
	}
	if err := json.Unmarshal(message.Value, &cloudEvent); err != nil {
		return fmt.Errorf("structured CloudEvent: %w", err)
	}
	if cloudEvent.Type == "" {
		return errors.New("structured CloudEvent without a type")
	}

	setIfEmpty(&message.ID, cloudEvent.ID)
	setIfEmpty(source, cloudEvent.Source)
	message.Name, message.ContentType, message.SchemaVersion = cloudEvent.Type, cloudEvent.DataContentType, cloudEvent.SchemaVersion

	// JSON holds a text as a string. The value of the message is the text.
	isText := len(cloudEvent.Data) > 0 && cloudEvent.Data[0] == '"' && !isJSON(cloudEvent.DataContentType)
	switch {
	case cloudEvent.Base64 != nil:
		data, err := base64.StdEncoding.DecodeString(*cloudEvent.Base64)
		if err != nil {
			return fmt.Errorf("structured CloudEvent: data_base64: %w", err)
		}
		message.Value = data
	case isText:
		var text string
		if err := json.Unmarshal(cloudEvent.Data, &text); err != nil {
			return fmt.Errorf("structured CloudEvent: data: %w", err)
		}
		message.Value = []byte(text)
	default:
		// Missing data is an empty value, because nil would be a tombstone.
		message.Value = append([]byte{}, bytes.TrimSpace(cloudEvent.Data)...)
	}
	return nil
}

func isJSON(contentType string) bool {
	mediaType, _, _ := strings.Cut(contentType, ";")
	mediaType = strings.TrimSpace(mediaType)
	return mediaType == "" || mediaType == "application/json" || strings.HasSuffix(mediaType, "+json")
}

// checkIdentity returns an error if the id or the namespace is too long. The inbox could not mark such a message, and no
// dead letter could have its id.
func checkIdentity(message *Message) error {
	if n := max(len(message.ID), len(message.Source)); n > maxIdentity {
		return malformed("the id or namespace has %d bytes: at most %d are allowed", n, maxIdentity)
	}
	return nil
}

// completeMessage fills in the fields that every message has with any decoder.
//
// A record without an id is identified by its place and its timestamp. With the timestamp, a record at the same place of a
// topic that was deleted and created again has another identity. The identity stays the same when the record is moved to
// another topic.
func completeMessage(message *Message, record *transport.Record, group string) *Message {
	message.Topic, message.Partition, message.Offset, message.LeaderEpoch = record.Topic, record.Partition, record.Offset, record.LeaderEpoch
	if message.Time.IsZero() {
		message.Time = record.Time
	}
	if message.ID == "" {
		message.ID = fmt.Sprintf("%s/%d/%d@%d", record.Topic, record.Partition, record.Offset, record.Time.UnixMilli())
	}

	// With the header, the message keeps its id when it is moved to another topic.
	if _, ok := message.Header(HeaderID); !ok {
		message.Headers = append([]event.Header{{Key: HeaderID, Value: []byte(message.ID)}}, message.Headers...)
	}

	message.Attempt = max(message.Attempt, 1)
	message.Group = group
	return message
}
