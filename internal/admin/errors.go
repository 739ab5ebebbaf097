package admin

import (
	"context"
	"errors"

	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/deadletter"
	"github.com/outrelay/outrelay/internal/lease"
	"github.com/outrelay/outrelay/internal/store"
)

// Failure is what kind of error a use-case returned, for those who show it.
type Failure string

// The kinds of failures.
const (
	FailInvalid     Failure = "invalid"     // the request cannot be meant so
	FailNotFound    Failure = "not_found"   // what it names is not there
	FailConflict    Failure = "conflict"    // it does not fit what is there now
	FailChanged     Failure = "changed"     // what it was made from was changed meanwhile
	FailForbidden   Failure = "forbidden"   // the relay's user lacks a privilege
	FailUnavailable Failure = "unavailable" // the servers did not answer or did not do it; it may help to try again
)

// Explain tells the kind of an error, and what to do about it; "" where the error says so itself. An error of the use-case's
// own that is no other kind is invalid.
func Explain(err error) (kind Failure, hint string) {
	var (
		privilege *store.PrivilegeError
		server    mongo.ServerError
		compacted *CompactedError
		refused   *deadletter.RefusedError
		replayed  *deadletter.ReplayedError
		claimed   *store.ClaimedError
	)
	is := func(targets ...error) bool {
		for _, t := range targets {
			if errors.Is(err, t) {
				return true
			}
		}
		return false
	}
	switch {
	case is(store.ErrNotFound, lease.ErrNotFound, store.ErrNoWatcher):
		return FailNotFound, "check the name, the id, the watcher and its slot"
	case is(ErrCursor, deadletter.ErrCursor, store.ErrBadCursor):
		return FailInvalid, "pass on the cursor that the page before gave, or none for the first page"
	case is(deadletter.ErrEmptyQuery, ErrNothingSaid):
		return FailInvalid, "give a condition, or all: true if everything is meant"
	case is(ErrNoBound):
		return FailInvalid, "give from, or ids"
	case is(deadletter.ErrConflict):
		return FailChanged, "read the letter again and edit that version"
	case is(ErrUnconfirmed):
		return FailConflict, "type the phrase that the preview shows"
	case errors.As(err, &compacted):
		return FailConflict, "force: true if the readers of these topics can bear it, or other topics"
	case is(ErrOtherNode):
		return FailConflict, "name a node that runs the watcher; outrelay nodes lists them"
	case errors.As(err, &refused), errors.As(err, &replayed), errors.As(err, &claimed), is(ErrLive, ErrNodeAlive, ErrOlderNodes, store.ErrReplayMoved, ErrReplayStalled):
		return FailConflict, ""
	case is(ErrUnavailable, ErrReplaysFull):
		return FailUnavailable, ""
	case errors.As(err, &privilege):
		return FailForbidden, "grant what is named; outrelay doctor lists everything that is missing"
	case mongo.IsTimeout(err), mongo.IsNetworkError(err), is(context.DeadlineExceeded, context.Canceled, mongo.ErrClientDisconnected):
		return FailUnavailable, "MongoDB did not answer in time; what was done until then is done, and the same request does the rest"
	case errors.As(err, &server):
		if server.HasErrorCode(codeUnauthorized) {
			return FailForbidden, "grant the privilege to the relay's user; outrelay doctor lists everything that is missing"
		}
		return FailUnavailable, "MongoDB refused it; its log says more"
	}
	return FailInvalid, ""
}

const codeUnauthorized = 13
