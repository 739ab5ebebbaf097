package admin

import (
	"context"
	"errors"

	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/kafkawire"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/mongodb/listing"
	"github.com/outrelay/outrelay/internal/relay/connect"
	"github.com/outrelay/outrelay/internal/relay/stored/lease"
	"github.com/outrelay/outrelay/internal/relay/stored/letters"
	"github.com/outrelay/outrelay/internal/relay/stored/outboxes"
	"github.com/outrelay/outrelay/internal/relay/stored/requeues"
)

// Failure is the kind of an error that a use-case returned. The command line, the API and the page
// present errors by it.
type Failure string

// The kinds of failures.
const (
	FailInvalid     Failure = "invalid"     // the request is wrong
	FailNotFound    Failure = "not_found"   // the named thing does not exist
	FailConflict    Failure = "conflict"    // the request conflicts with the current state
	FailChanged     Failure = "changed"     // the edited version is no longer the current one
	FailForbidden   Failure = "forbidden"   // the relay's user lacks a privilege
	FailUnavailable Failure = "unavailable" // the servers did not respond or failed; a retry may help
)

// KafkaError is the error of a use-case that has read MongoDB and cannot use Kafka.
type KafkaError struct{ Err error }

func (e *KafkaError) Error() string { return "MongoDB responds, and Kafka does not: " + e.Err.Error() }
func (e *KafkaError) Unwrap() error { return e.Err }

// Rejected reports whether Kafka rejects the login, so that a later attempt fails as well.
func (e *KafkaError) Rejected() bool {
	var diagnosis *kafkawire.Diagnosis
	return errors.As(e.Err, &diagnosis) && diagnosis.Rejected()
}

// Explain returns the kind of an error and its fix. The fix is "" if the error text
// already contains the fix. An error of a use-case that has no other kind is invalid.
func Explain(err error) (kind Failure, fix string) {
	var (
		privilege *mongodb.PrivilegeError
		server    mongo.ServerError
		rejected  *letters.RejectedError
		claimed   *outboxes.ClaimedError
		kafka     *KafkaError
	)
	is := func(targets ...error) bool {
		for _, t := range targets {
			if errors.Is(err, t) {
				return true
			}
		}
		return false
	}

	// The most specific kinds come first: an error of the driver may be the cause of any of them.
	switch {
	case errors.As(err, &kafka) && kafka.Rejected():
		return FailForbidden, ""
	case errors.As(err, &kafka):
		return FailUnavailable, "check the brokers and the login with outrelay doctor"
	case is(ErrUnknownNode):
		return FailNotFound, "to pin a node before its first start, use force: true"
	case is(mongodb.ErrNotFound, lease.ErrNotFound):
		return FailNotFound, "check the name, the id, the watcher and its slot"

	case is(listing.ErrCursor):
		return FailInvalid, "pass the cursor that the previous page returned, or none for the first page"
	case is(letters.ErrEmptyQuery, ErrNoCondition):
		return FailInvalid, "give a condition, or all: true if everything is meant"
	case is(ErrUnboundedReplay):
		return FailInvalid, "give from, or ids"

	case is(requeues.ErrOtherVersion):
		return FailChanged, "read the dead letter again and edit that version"

	case is(ErrUnconfirmed):
		return FailConflict, "type the phrase that the preview shows"
	case is(ErrNoStandby):
		return FailConflict, "to step down nevertheless, use force: true"
	case is(ErrCompacted):
		return FailConflict, "use force: true if the readers of these topics tolerate it, or choose other topics"
	case errors.As(err, &rejected), errors.As(err, &claimed),
		is(requeues.ErrRequeued, ErrInUse, ErrUnsent, ErrNodeAlive, ErrOtherNode, ErrReplayMoved, ErrReplayStalled):
		return FailConflict, ""

	case is(connect.ErrTopicExists):
		return FailConflict, "choose another name, or write to the topic that exists"
	case is(connect.ErrTopicForbidden):
		return FailForbidden, ""
	case is(kafkawire.ErrAway):
		return FailUnavailable, "check the brokers and the login with outrelay doctor"

	case is(ErrUnavailable, ErrReplaysFull):
		return FailUnavailable, ""
	case errors.As(err, &privilege):
		return FailForbidden, "grant the named privilege; outrelay doctor lists all missing privileges"
	case mongo.IsTimeout(err), mongo.IsNetworkError(err),
		is(context.DeadlineExceeded, context.Canceled, mongo.ErrClientDisconnected):
		return FailUnavailable, "check MongoDB with outrelay doctor, and send the same request again: completed parts are kept"

	case mongodb.HasCode(err, mongodb.CodeUnauthorized):
		return FailForbidden, "grant the privilege to the relay's user; outrelay doctor lists all missing privileges"
	case errors.As(err, &server):
		return FailUnavailable, "MongoDB rejected it; see the MongoDB log for the reason"
	}
	return FailInvalid, ""
}

// IsUnreachable reports whether MongoDB did not respond, or rejected the login. The error of the driver describes the topology
// and not the cause.
func IsUnreachable(err error) bool {
	// Kafka may also be what did not respond in time.
	if errors.Is(err, kafkawire.ErrAway) || errors.As(err, new(*KafkaError)) {
		return false
	}
	return mongo.IsTimeout(err) || mongo.IsNetworkError(err) || errors.Is(err, context.DeadlineExceeded) ||
		mongodb.HasCode(err, mongodb.CodeAuthenticationFailed)
}
