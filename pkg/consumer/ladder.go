package consumer

import (
	"bytes"
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/outrelay/outrelay/internal/record"
)

// The headers of messages that a policy moved to another place, beside HeaderOnly and HeaderAttempt. All of them vanish
// when the message is handled or moved again. A consumer ignores them, and HeaderAttempt, in records that its group did not
// write: in those whose HeaderOnly names another group or none.
const (
	// HeaderRetryDue is when a message of a retry topic is due, in Unix milliseconds.
	// A consumer heeds it in retry topics of its group alone.
	HeaderRetryDue = record.HeaderRetryDue
	// HeaderRetryOrigin is "<topic>/<partition>/<offset>" of the record that the message came in at first.
	HeaderRetryOrigin = record.HeaderRetryOrigin
	// HeaderRetryHistory is the failures so far, as a JSON array of Failure.
	HeaderRetryHistory = record.HeaderRetryHistory
	// headerKept begins the headers that carry those through the outbox which the outbox keeps for itself.
	headerKept = "retry-keep-"
	// headerNoKey says that the message had no key before it went through the outbox, where every event has one.
	headerNoKey = "retry-no-key"
	// headerAsItWas says that headers which the relay makes of the event's fields are to be as the message had them.
	headerAsItWas = "retry-as-it-was"
)

// HeaderDeliverBy says until when a message is worth anything: RFC 3339, or Unix milliseconds. The attribute expirytime of a
// CloudEvent, header ce_expirytime, means the same. Producers set it, so its name does not begin with the reserved prefix.
const (
	HeaderDeliverBy     = "x-outrelay-deliver-by"
	headerCEExpiryTime  = "ce_expirytime"
	headerFaultOf       = "fault-of" // marks fault events, so that none is made of another
	headerEncryption    = "encryption"
	headerClaimCheck    = "claim-check"
	headerEncryptedType = "encryption-type"
)

// Origin is the record that a message came in at first, before policies moved it.
type Origin struct {
	Topic     string `bson:"topic" json:"topic"`
	Partition int32  `bson:"partition" json:"partition"`
	Offset    int64  `bson:"offset" json:"offset"`
}

// String is "topic/partition/offset".
func (o Origin) String() string { return fmt.Sprintf("%s/%d/%d", o.Topic, o.Partition, o.Offset) }

// Origin is where the message came in at first: its own place unless a policy moved it.
func (m *Message) Origin() Origin { return originOf(m) }

func originOf(m *Message) Origin {
	own := Origin{m.Topic, m.Partition, m.Offset}
	v, ok := m.Header(HeaderRetryOrigin)
	if !ok {
		return own
	}
	parts := strings.Split(string(v), "/")
	if len(parts) != 3 {
		return own
	}
	p, err := strconv.ParseInt(parts[1], 10, 32)
	o, err2 := strconv.ParseInt(parts[2], 10, 64)
	if err != nil || err2 != nil {
		return own
	}
	return Origin{parts[0], int32(p), o}
}

const (
	// maxRetryDelay bounds how long a message may wait in a retry topic: Kafka's default retention. [Rule.Schedule] is for
	// longer delays.
	maxRetryDelay = 7 * 24 * time.Hour
	// maxAttempt bounds the attempt number that a record may bring.
	maxAttempt = 1_000_000
)

// keepOwnControls removes the headers from m by which a policy steers a retry unless this group wrote them. Anybody who may
// write to a topic, or copies the headers of a message, could otherwise delay a lane or redirect a retry.
func (c *Consumer) keepOwnControls(m *Message, now time.Time) {
	if !forGroup(m.Headers, c.group) {
		m.Attempt = 1
		c.dropHeaders(m, HeaderAttempt, HeaderRetryDue, HeaderRetryOrigin, HeaderRetryHistory)
		return
	}
	m.Attempt = min(m.Attempt, maxAttempt)

	// A retry topic has the messages of the topic that it is named after. A message in any other topic came from there.
	origin := originOf(m).Topic
	named := isRetryTopic(m.Topic, c.group) || c.isNamedRetryTopic(m.Topic)
	if origin != m.Topic && !c.mayComeFrom(origin, m.Topic) {
		c.dropHeaders(m, HeaderRetryOrigin)
	}
	if due, ok := timeHeader(m, HeaderRetryDue); ok && (!named || due.After(now.Add(maxRetryDelay))) {
		c.dropHeaders(m, HeaderRetryDue)
	}
}

func (*Consumer) dropHeaders(m *Message, names ...string) {
	if slices.ContainsFunc(m.Headers, func(h Header) bool { return slices.Contains(names, h.Key) }) {
		m.Headers = slices.DeleteFunc(slices.Clone(m.Headers), func(h Header) bool { return slices.Contains(names, h.Key) })
	}
}

// forGroup reports whether the record is for the group alone: one that the group moved or that somebody requeued for it.
func forGroup(headers []Header, group string) bool {
	for _, h := range headers {
		if h.Key == HeaderOnly {
			return bytes.HasPrefix(h.Value, []byte(group+"/"))
		}
	}
	return false
}

// isRetryTopic reports whether a topic has a name that RetryTopicName gives for the group.
func isRetryTopic(topic, group string) bool {
	origin, n := cutRetryTopic(topic, group)
	return origin != "" && n > 0
}

// cutRetryTopic is the reverse of RetryTopicName.
func cutRetryTopic(topic, group string) (origin string, n int) {
	at := strings.LastIndex(topic, "."+group+".retry.")
	if at < 0 {
		return "", 0
	}
	n, err := strconv.Atoi(topic[at+len("."+group+".retry."):])
	if err != nil {
		return "", 0
	}
	return topic[:at], n
}

// isNamedRetryTopic reports whether a policy moves messages to the topic under a name of its own choice.
func (c *Consumer) isNamedRetryTopic(topic string) bool {
	deciders := []Decider{c.s.decider}
	for _, r := range c.reg.snapshot().all {
		deciders = append(deciders, r.decider)
	}
	return slices.ContainsFunc(deciders, func(d Decider) bool {
		t, ok := d.(topicMover)
		return ok && slices.Contains(t.Topics(c.group, ""), topic)
	})
}

// mayComeFrom reports whether a message in a retry topic can have come from the origin that it names.
func (c *Consumer) mayComeFrom(origin, topic string) bool {
	if at, n := cutRetryTopic(topic, c.group); n > 0 {
		return at == origin
	}
	return c.isNamedRetryTopic(topic) && (c.topicBoard != nil || slices.Contains(c.s.topics, origin))
}

// Precheck says whether m may be handled at all now: a *NotDueError for a message of a retry topic before its time, an
// *ExpiredError for one that is worth nothing any more. The times are of clients' clocks, as every time in a header is.
func Precheck(m *Message, now time.Time) error {
	if due, ok := timeHeader(m, HeaderRetryDue); ok && due.After(now) {
		return &NotDueError{Due: due}
	}
	names := []string{HeaderDeliverBy}
	if _, cloudEvent := m.Header(record.HeaderCESpecVersion); cloudEvent {
		names = append(names, headerCEExpiryTime)
	}
	for _, name := range names {
		if end, ok := timeHeader(m, name); ok && !end.After(now) {
			return &ExpiredError{Deadline: end}
		}
	}
	return nil
}

// timeHeader is the time of a header; one that is no time is none.
func timeHeader(m *Message, name string) (time.Time, bool) {
	v, ok := m.Header(name)
	if !ok {
		return time.Time{}, false
	}
	if ms, err := strconv.ParseInt(string(v), 10, 64); err == nil {
		return time.UnixMilli(ms), true
	}
	t, err := time.Parse(time.RFC3339Nano, string(v))
	return t, err == nil
}

// millis is a time as timeHeader reads it.
func millis(t time.Time) []byte { return strconv.AppendInt(nil, t.UnixMilli(), 10) }

// restoredFor is restored, for records that the group handed to the outbox. Others may carry headers of these names too.
func restoredFor(group string, headers []Header, key []byte) ([]Header, []byte) {
	for _, h := range headers {
		if h.Key == headerKept+HeaderOnly && bytes.HasPrefix(h.Value, []byte(group+"/")) {
			return restored(headers, key)
		}
	}
	return headers, key
}

// restored are the headers of a record as they were before it went through the outbox to be delivered later. The core
// calls it before the decoder, so that a decoder sees the message as it was.
func restored(headers []Header, key []byte) ([]Header, []byte) {
	kept, asItWas := false, false
	for _, h := range headers {
		kept = kept || strings.HasPrefix(h.Key, headerKept)
		asItWas = asItWas || h.Key == headerAsItWas
	}
	if !kept {
		return headers, key
	}
	asItWas = asItWas && !isStructured(headers) // then the body says it
	out := make([]Header, 0, len(headers))
	for _, h := range headers { // the kept ones first, as the identity is
		if name, ok := strings.CutPrefix(h.Key, headerKept); ok {
			out = append(out, Header{Key: name, Value: h.Value})
		}
	}
	for _, h := range headers {
		switch {
		case strings.HasPrefix(h.Key, headerKept), reserved(h.Key), h.Key == headerAsItWas, asItWas && byPreset[h.Key]:
		case h.Key == headerNoKey:
			key = nil
		default:
			out = append(out, h)
		}
	}
	return out, key
}

// isStructured reports whether the value is a CloudEvent with its payload inside.
func isStructured(headers []Header) bool {
	return slices.ContainsFunc(headers, func(h Header) bool {
		return (h.Key == record.HeaderHTTPContentType || h.Key == record.HeaderContentType) && strings.HasPrefix(string(h.Value), record.TypeCloudEvents)
	})
}

// reserved reports whether the outbox keeps headers of that name for itself.
func reserved(name string) bool {
	return name == HeaderID || strings.HasPrefix(name, record.ReservedPrefix)
}

// moved is a copy of m for another place: for that handler of the group alone, with the attempt that comes next, where it
// came from, and what failed so far. due is zero if it may be handled at once.
func moved(m *Message, handler string, v Verdict, due time.Time) *Message {
	c := m.Copy()
	origin := originOf(m)
	history := historyOf(m, v)
	for _, name := range []string{HeaderOnly, HeaderAttempt, HeaderRetryDue, HeaderRetryOrigin, HeaderRetryHistory} {
		c.DeleteHeader(name)
	}
	c.SetHeader(HeaderOnly, []byte(m.Group+"/"+handler))
	c.SetHeader(HeaderAttempt, strconv.AppendInt(nil, int64(nextAttempt(m, v)), 10))
	c.SetHeader(HeaderRetryOrigin, []byte(origin.String()))
	if !due.IsZero() {
		c.SetHeader(HeaderRetryDue, millis(due))
	}
	for i := range history { // a header is not the place for more
		history[i].Reason = clip(history[i].Reason, maxHeaderReason)
	}
	if text, err := json.Marshal(history); err == nil && len(history) > 0 {
		c.SetHeader(HeaderRetryHistory, text)
	}
	return c
}

// maxHeaderReason bounds the text of each failure that travels with a message, in bytes.
const maxHeaderReason = 128

// nextAttempt is the number of the attempt that follows the verdict.
func nextAttempt(m *Message, v Verdict) int {
	spent := max(v.Attempts.Total, max(m.Attempt, 1)) - v.Attempts.Spared
	if v.Uncounted {
		spent--
	}
	return max(spent, 0) + 1
}

// attemptsOf is how many attempts a message had that is given up.
func attemptsOf(m *Message, v Verdict) int { return nextAttempt(m, v) - 1 }

// historyOf is the failures of earlier deliveries and of this one, the latest MaxHistory.
func historyOf(m *Message, v Verdict) []Failure {
	var all []Failure
	if text, ok := m.Header(HeaderRetryHistory); ok {
		d := json.NewDecoder(bytes.NewReader(text))
		if d.Decode(&all) != nil {
			all = nil // a header of that name that is not ours
		}
	}
	all = append(all, v.Attempts.History...) // a slice of our own
	return all[max(0, len(all)-MaxHistory):]
}
