package consumer

import (
	"bytes"
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/service/transport"
	"github.com/outrelay/outrelay/pkg/consumer/deadletter"
	"github.com/outrelay/outrelay/pkg/event"
)

// retryHeaders are the headers of messages in retry topics. They are removed when the message is handled or moved again. A
// consumer ignores all but the first in records that its group did not write: in records whose record.HeaderOnly names another
// group or none. It uses the due time only in retry topics of its own group.
var retryHeaders = []string{record.HeaderOnly, record.HeaderAttempt, record.HeaderRetryDue, record.HeaderRetryOrigin, record.HeaderRetryHistory}

// recordPlace is the place of a record.
type recordPlace struct {
	Topic     string
	Partition int32
	Offset    int64
}

func (p recordPlace) String() string { return record.FormatPlace(p.Topic, p.Partition, p.Offset) }

// formatOrigin returns the value of record.HeaderRetryOrigin, which originOf reads: "topic/partition/offset".
func (p recordPlace) formatOrigin() string {
	return fmt.Sprintf("%s/%d/%d", p.Topic, p.Partition, p.Offset)
}

// originOf returns the place of the message's first record: its own place unless it was moved to a retry topic.
func originOf(message *Message) recordPlace {
	own := recordPlace{message.Topic, message.Partition, message.Offset}
	origin, ok := message.Header(record.HeaderRetryOrigin)
	if !ok {
		return own
	}

	parts := strings.Split(string(origin), "/")
	if len(parts) != 3 {
		return own
	}
	partition, err := strconv.ParseInt(parts[1], 10, 32)
	offset, err2 := strconv.ParseInt(parts[2], 10, 64)
	if err != nil || err2 != nil {
		return own
	}
	return recordPlace{parts[0], int32(partition), offset}
}

const (
	// maxRetryDelay bounds how long a message may wait in a retry topic.
	maxRetryDelay = 7 * 24 * time.Hour
	// retryRetention is how long a new retry topic keeps a message that is due: Kafka's default retention.
	retryRetention = 7 * 24 * time.Hour
	// maxAttempt bounds the attempt number that a record may carry.
	maxAttempt = 1_000_000
)

// checkRetryTopics returns an error if the names of n retry topics of a handler are no names of topics.
func (c *Consumer) checkRetryTopics(n int) error {
	const maxTopicName = 249
	isAllowed := func(char rune) bool {
		return char >= 'a' && char <= 'z' || char >= 'A' && char <= 'Z' || char >= '0' && char <= '9' || strings.ContainsRune("._-", char)
	}
	isForbidden := func(char rune) bool { return !isAllowed(char) }
	if n > 0 && strings.ContainsFunc(c.group, isForbidden) {
		return fmt.Errorf("WithRetryTopics: the group %q is part of their names, which may have letters, digits, dots, "+
			"underscores and hyphens only: name the group so, or use Retry without topics", c.group)
	}

	for _, topic := range c.s.topics {
		if name := transport.RetryTopicName(topic, c.group, n); n > 0 && len(name) > maxTopicName {
			return fmt.Errorf("WithRetryTopics: the name %q has %d characters: at most %d are allowed", name, len(name), maxTopicName)
		}
	}
	return nil
}

// dropForeignControls removes the retry headers from message that this group did not write. Otherwise any
// producer of the topic, or a service that copies the headers of a message, could delay a lane or
// redirect a retry.
func (c *Consumer) dropForeignControls(message *Message, now time.Time) {
	if !isForGroup(message.Headers, c.group) {
		message.Attempt = 1
		dropHeaders(message, record.HeaderAttempt, record.HeaderRetryDue, record.HeaderRetryOrigin, record.HeaderRetryHistory)
		return
	}
	message.Attempt = min(message.Attempt, maxAttempt)

	// A retry topic has the messages of the topic in its name. A message in any other topic was
	// first written there.
	origin := originOf(message).Topic
	if origin != message.Topic && !c.mayComeFrom(origin, message.Topic) {
		dropHeaders(message, record.HeaderRetryOrigin)
	}

	named := isRetryTopic(message.Topic, c.group)
	if due, ok := parseTimeHeader(message, record.HeaderRetryDue); ok && (!named || due.After(now.Add(maxRetryDelay))) {
		dropHeaders(message, record.HeaderRetryDue)
	}
}

// dropHeaders removes the headers of these names from message. It copies the list, which other messages
// may share.
func dropHeaders(message *Message, names ...string) {
	isNamed := func(header event.Header) bool { return slices.Contains(names, header.Key) }
	if slices.ContainsFunc(message.Headers, isNamed) {
		message.Headers = slices.DeleteFunc(slices.Clone(message.Headers), isNamed)
	}
}

// isForGroup reports whether the record is for the group alone: the group moved it.
func isForGroup(headers []event.Header, group string) bool {
	for _, h := range headers {
		if h.Key == record.HeaderOnly {
			return bytes.HasPrefix(h.Value, []byte(group+"/"))
		}
	}
	return false
}

// isRetryTopic reports whether topic is a name that transport.RetryTopicName returns for the group.
func isRetryTopic(topic, group string) bool {
	origin, n := transport.ParseRetryTopic(topic, group)
	return origin != "" && n > 0
}

// mayComeFrom reports whether a message in a retry topic can have been moved there from the topic origin.
func (c *Consumer) mayComeFrom(origin, topic string) bool {
	at, n := transport.ParseRetryTopic(topic, c.group)
	return n > 0 && at == origin
}

// checkTimes reports whether message may be handled now. It returns a *notDueError for a message of a retry
// topic that is not due, and an *expiredError for an expired message. The times in headers come
// from the clocks of clients. The attribute expirytime of a CloudEvent means the same as record.HeaderDeliverBy.
func checkTimes(message *Message, now time.Time) error {
	if due, ok := parseTimeHeader(message, record.HeaderRetryDue); ok && due.After(now) {
		return &notDueError{Due: due}
	}

	names := []string{record.HeaderDeliverBy}
	if _, cloudEvent := message.Header(record.HeaderCESpecVersion); cloudEvent {
		names = append(names, record.HeaderCEExpiryTime)
	}
	for _, name := range names {
		if end, ok := parseTimeHeader(message, name); ok && !end.After(now) {
			return &expiredError{Deadline: end}
		}
	}
	return nil
}

// parseTimeHeader returns the time in a header. It returns false if there is no such header, or if
// it is not a time.
func parseTimeHeader(message *Message, name string) (time.Time, bool) {
	value, ok := message.Header(name)
	if !ok {
		return time.Time{}, false
	}
	if ms, err := strconv.ParseInt(string(value), 10, 64); err == nil {
		return time.UnixMilli(ms), true
	}

	moment, err := time.Parse(time.RFC3339Nano, string(value))
	return moment, err == nil
}

// formatMillis returns moment in Unix milliseconds, for parseTimeHeader.
func formatMillis(moment time.Time) []byte { return strconv.AppendInt(nil, moment.UnixMilli(), 10) }

// newRetryMessage returns a copy of message for another place. Its headers name the only handler of the
// group that gets it, the next attempt, the origin and the failures so far. due is zero if the
// message may be handled at once.
func newRetryMessage(message *Message, handler string, verdict verdict, due time.Time) *Message {
	copied := message.copy()
	origin := originOf(message)
	history := failureHistory(message, verdict)

	// The headers of an earlier retry are replaced.
	for _, name := range retryHeaders {
		copied.DeleteHeader(name)
	}

	copied.SetHeader(record.HeaderOnly, []byte(message.Group+"/"+handler))
	copied.SetHeader(record.HeaderAttempt, strconv.AppendInt(nil, int64(nextAttempt(message, verdict)), 10))
	copied.SetHeader(record.HeaderRetryOrigin, []byte(origin.formatOrigin()))
	if !due.IsZero() {
		copied.SetHeader(record.HeaderRetryDue, formatMillis(due))
	}

	// A header is no place for longer texts.
	for i := range history {
		history[i].Reason = record.Clip(history[i].Reason, maxHeaderReason)
	}
	if text, err := json.Marshal(history); err == nil && len(history) > 0 {
		copied.SetHeader(record.HeaderRetryHistory, text)
	}
	return copied
}

// maxHeaderReason bounds the text of each failure in record.HeaderRetryHistory, in bytes.
const maxHeaderReason = 128

// nextAttempt returns the number of the attempt that follows the verdict.
func nextAttempt(message *Message, verdict verdict) int {
	spent := max(verdict.Attempts.Total, max(message.Attempt, 1)) - verdict.Attempts.Spared
	if verdict.Uncounted {
		spent--
	}
	return max(spent, 0) + 1
}

// attemptsSpent returns how many attempts a message had when it is given up.
func attemptsSpent(message *Message, verdict verdict) int { return nextAttempt(message, verdict) - 1 }

// failureHistory returns the failures of earlier deliveries and of this one: the latest maxHistory,
// in a new slice.
func failureHistory(message *Message, verdict verdict) []deadletter.Failure {
	var all []deadletter.Failure
	if text, ok := message.Header(record.HeaderRetryHistory); ok {
		decoder := json.NewDecoder(bytes.NewReader(text))
		if decoder.Decode(&all) != nil {
			// Another program wrote a header of that name.
			all = nil
		}
	}

	all = append(all, verdict.Attempts.History...)
	return all[max(0, len(all)-maxHistory):]
}
