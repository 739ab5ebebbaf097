package lease

import (
	"context"
	"errors"

	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/mongodb"
)

var (
	// ErrLeaseLost is the error when another process has acquired the lease, or the document is gone.
	// All work that started under the lease must end. Fences reject the writes still in flight.
	ErrLeaseLost = errors.New("lease lost")
	// ErrReleased is the cause of [Held.Context] after [Held.Release].
	ErrReleased = errors.New("lease released")
	// errVanished accompanies ErrLeaseLost when the watcher document was deleted while it was owned.
	errVanished = errors.New("watcher document vanished")
	// ErrNotFound is the error when there is no watcher document with the id.
	ErrNotFound = errors.New("watcher document not found")
	// errCopiedState is the error for a watcher document that was written on another replica set. Its
	// transactional ids may be in use there, and its token is not valid here (N5).
	errCopiedState = errors.New("the state was copied from another replica set")
)

// finalError is an error that ends Acquire. Acquire returns the error in it.
type finalError struct{ error }

// errOutcomeUnknown is the error of a write that the document does not show yet. The next attempt
// settles the outcome.
var errOutcomeUnknown = errors.New("outcome of the write is unknown")

// errNotOwner is the error when the fence of a transaction matched no document.
var errNotOwner = errors.New("watcher document has another owner")

// Error codes of the server. Codes are stable, messages are not.
const (
	codeAuthenticationFailed = 18
	codeCommandNotFound      = 59
)

// resendCodes are the error codes after which a write is sent again at once. The server was changing
// state, or had applied the write without a majority yet.
var resendCodes = []int{6, 7, 64, 89, 91, 189, 262, 9001, 10107, 11600, 11602, 13435, 13436}

// mayBeApplied reports whether the server may have applied a write that failed with err, or would
// apply it if the caller sent it again now.
func mayBeApplied(err error) bool {
	// A timeout has used up the time of this call, so there is none left to send the write again.
	if mongo.IsTimeout(err) {
		return false
	}

	var we mongo.WriteException
	if errors.As(err, &we) && we.WriteConcernError != nil {
		return true
	}
	return mongo.IsNetworkError(err) || mongodb.HasCode(err, resendCodes...)
}

// mayRetryTransaction reports whether a transaction that failed with err may run again: it had no
// effect, or its effect is unknown.
func mayRetryTransaction(err error) bool {
	var le mongo.LabeledError
	if errors.As(err, &le) &&
		(le.HasErrorLabel("TransientTransactionError") || le.HasErrorLabel("UnknownTransactionCommitResult")) {
		return true
	}

	timedOut := mongo.IsTimeout(err) || errors.Is(err, context.DeadlineExceeded)
	return timedOut || errors.Is(err, errOutcomeUnknown) || mayBeApplied(err)
}

// fixFor returns the fix that an operator can make after err.
func fixFor(err error) string {
	switch {
	case mongodb.HasCode(err, mongodb.CodeUnauthorized):
		return "grant find, insert and update on the state database to the relay's user"
	case mongodb.HasCode(err, codeAuthenticationFailed):
		return "check the user, the password and authSource of the MongoDB address"
	}
	return "wait until the server is available again; no event is lost"
}
