package event

import (
	"errors"
	"fmt"
	"strings"
	"time"
	"unicode/utf8"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/contract/envelope"
	"github.com/outrelay/outrelay/internal/contract/eventid"
)

// InvalidError lists all problems of an event. It wraps ErrInvalid.
type InvalidError struct {
	// ID identifies the event. It is zero if the event has none.
	ID ID

	// Problems contains one text for each problem.
	Problems []string
}

// Error lists the problems.
func (e *InvalidError) Error() string {
	return fmt.Sprintf("%s %s: %s", ErrInvalid, e.ID, strings.Join(e.Problems, "; "))
}

// Unwrap returns ErrInvalid.
func (e *InvalidError) Unwrap() error { return ErrInvalid }

const (
	maxTextBytes  = 4096 // for a type, a key or an attribute
	maxTopicBytes = 249  // the limit of Kafka
)

// Validate returns nil, or an *InvalidError that lists all problems. It does no I/O, and it does
// not depend on the configuration of the relay, which decides whether a topic is allowed.
func (e Event) Validate() error {
	var validator validator
	if e.payload.problem != "" {
		validator.addProblem("%s", e.payload.problem)
	}

	idType, idText := eventid.Parts(e.id)
	switch {
	case e.id.IsZero():
		validator.addProblem("the event was not made by New")
	// A UUID or ObjectID of zeros is an id that the service never set.
	case strings.Trim(idText, "\x00") == "" && idType != bson.TypeString:
		validator.addProblem("id is all zeros")
	case idText == "":
		validator.addProblem("id is empty")
	case len(idText) > envelope.MaxIDBytes:
		validator.addProblem("id has %d bytes; at most %d are allowed", len(idText), envelope.MaxIDBytes)
	case idType == bson.TypeString && !utf8.ValidString(idText):
		validator.addProblem("id is not UTF-8")
	}

	validator.requireText("aggregate type", e.about.Type)
	validator.requireText("aggregate id", e.about.ID)
	validator.requireText("name", e.name)
	validator.checkText("key", e.key)
	validator.checkText("content type", e.payload.contentType)
	validator.checkText("schema version", e.schemaVersion)
	validator.checkText("source", e.source)
	validator.checkText("subject", e.subject)
	if e.topic != "" {
		validator.checkTopic(e.topic)
	}

	for _, h := range e.headers {
		if problem := envelope.HeaderProblem([]byte(h.Key)); problem != "" {
			validator.addProblem("%s", problem)
		}
		validator.checkText("header name", h.Key)
	}

	// The zero time is a date that the service never set: such an event would be due at once.
	if e.scheduled && e.dueAt.IsZero() {
		validator.addProblem("dueAt is the zero time")
	}
	validator.checkDate("time", e.time)
	validator.checkDate("dueAt", e.dueAt)
	validator.checkDate("expiresAt", e.expiresAt)
	// The relay would drop such an event without a delivery.
	if !e.expiresAt.IsZero() && !e.dueAt.IsZero() && !e.expiresAt.After(e.dueAt) {
		validator.addProblem("expiresAt %s is not after dueAt %s",
			e.expiresAt.UTC().Format(time.RFC3339), e.dueAt.UTC().Format(time.RFC3339))
	}

	if len(validator.problems) == 0 {
		return nil
	}

	return &InvalidError{ID: e.id, Problems: validator.problems}
}

// ErrInvalid is the error of every invalid event. Test for it with errors.Is.
var ErrInvalid = errors.New("invalid event")

// validator collects the problems of an event.
type validator struct{ problems []string }

func (v *validator) addProblem(format string, args ...any) {
	v.problems = append(v.problems, fmt.Sprintf(format, args...))
}

// requireText is checkText of an attribute that may not be empty.
func (v *validator) requireText(field, value string) {
	if value == "" {
		v.addProblem("%s is empty", field)
	}
	v.checkText(field, value)
}

// checkText checks an attribute that is a text. field is its name in the problem.
func (v *validator) checkText(field, value string) {
	switch {
	case len(value) > maxTextBytes:
		v.addProblem("%s has %d bytes; at most %d are allowed", field, len(value), maxTextBytes)
	case !utf8.ValidString(value):
		v.addProblem("%s is not UTF-8", field)
	}
}

// checkTopic checks the name of a topic by Kafka's rule.
func (v *validator) checkTopic(name string) {
	legal := func(char rune) bool {
		return char >= 'a' && char <= 'z' || char >= 'A' && char <= 'Z' || char >= '0' && char <= '9' || char == '.' || char == '_' || char == '-'
	}

	bad := strings.IndexFunc(name, func(char rune) bool { return !legal(char) }) >= 0
	if bad || len(name) > maxTopicBytes || name == "." || name == ".." {
		v.addProblem("topic %.64q is not a legal name: 1 to %d of a-z A-Z 0-9 . _ -", name, maxTopicBytes)
	}
}

// checkDate checks that moment is not before 1970 and that every consumer can represent it.
func (v *validator) checkDate(field string, moment time.Time) {
	if !moment.IsZero() && (moment.Year() < 1970 || moment.Year() > 9999) {
		v.addProblem("%s is in the year %d; 1970 to 9999 is allowed", field, moment.Year())
	}
}
