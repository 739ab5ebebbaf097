package event

import (
	"fmt"
	"strings"
	"time"
	"unicode/utf8"

	"go.mongodb.org/mongo-driver/v2/bson"
)

// InvalidError lists everything that is wrong with an event. errors.Is(err, ErrInvalid) is true for it.
type InvalidError struct {
	ID       ID // zero if it has none
	Problems []string
}

func (e *InvalidError) Error() string {
	return fmt.Sprintf("%s %s: %s", ErrInvalid, e.ID, strings.Join(e.Problems, "; "))
}

// Unwrap is ErrInvalid.
func (e *InvalidError) Unwrap() error { return ErrInvalid }

const (
	maxID    = 1024 // bytes: a long _id appears three times in a change event and can make it too large for the server
	maxText  = 4096 // bytes of a type, key or attribute
	maxTopic = 249  // characters, Kafka's own limit
)

// Validate returns nil or an *InvalidError that lists every problem. It does no I/O and knows nothing of the relay's
// configuration: whether a topic is allowed is decided there.
func (e Event) Validate() error {
	v := validator{problems: e.problems[:len(e.problems):len(e.problems)]}
	switch {
	case e.id.IsZero():
		v.add("the event was not made by New")
	case strings.Trim(e.id.val, "\x00") == "" && e.id.typ != bson.TypeString:
		v.add("id is all zeros")
	case e.id.val == "":
		v.add("id is empty")
	case len(e.id.val) > maxID:
		v.add("id has %d bytes; at most %d are allowed", len(e.id.val), maxID)
	case e.id.typ == bson.TypeString && !utf8.ValidString(e.id.val):
		v.add("id is not UTF-8")
	}
	v.text("aggregate type", e.aggregateType, true)
	v.text("aggregate id", e.aggregateID, true)
	v.text("type", e.typ, true)
	v.text("key", e.key, false)
	v.text("content type", e.contentType, false)
	v.text("schema version", e.schemaVersion, false)
	v.text("source", e.source, false)
	v.text("subject", e.subject, false)
	if e.payloadType == bson.TypeString && !utf8.Valid(text(e.payload)) {
		v.add("payload is a string that is not UTF-8; pass bytes")
	}
	if e.topic != "" {
		v.topic(e.topic)
	}
	for _, h := range e.headers {
		if why := headerProblem([]byte(h.Key)); why != "" {
			v.add("%s", why)
		}
		v.text("header name", h.Key, false)
	}
	v.date("time", e.time)
	v.date("dueAt", e.dueAt)
	v.date("expiresAt", e.expiresAt)
	if !e.expiresAt.IsZero() && !e.dueAt.IsZero() && !e.expiresAt.After(e.dueAt) {
		v.add("expiresAt %s is not after dueAt %s", e.expiresAt.UTC().Format(time.RFC3339), e.dueAt.UTC().Format(time.RFC3339))
	}
	if len(v.problems) == 0 {
		return nil
	}
	return &InvalidError{ID: e.id, Problems: v.problems}
}

type validator struct{ problems []string }

func (v *validator) add(format string, args ...any) {
	v.problems = append(v.problems, fmt.Sprintf(format, args...))
}

func (v *validator) text(what, s string, required bool) {
	switch {
	case s == "" && required:
		v.add("%s is empty", what)
	case len(s) > maxText:
		v.add("%s has %d bytes; at most %d are allowed", what, len(s), maxText)
	case !utf8.ValidString(s):
		v.add("%s is not UTF-8", what)
	}
}

// topic checks the name by Kafka's rule.
func (v *validator) topic(name string) {
	legal := func(r rune) bool {
		return r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || r == '.' || r == '_' || r == '-'
	}
	bad := strings.IndexFunc(name, func(r rune) bool { return !legal(r) }) >= 0
	if bad || len(name) > maxTopic || name == "." || name == ".." {
		v.add("topic %.64q is not a legal name: 1 to %d of a-z A-Z 0-9 . _ -", name, maxTopic)
	}
}

// date keeps times where milliseconds since 1970 and every consumer's calendar can hold them.
func (v *validator) date(what string, t time.Time) {
	if !t.IsZero() && (t.Year() < 1970 || t.Year() > 9999) {
		v.add("%s is in the year %d; 1970 to 9999 is allowed", what, t.Year())
	}
}
