package lease

import (
	"context"
	"errors"
	"fmt"

	"go.mongodb.org/mongo-driver/v2/mongo"
)

var (
	// ErrLeaseLost says that another process has acquired the lease, or that the document is gone. Everything that was
	// begun under the lease must end; what is in flight is refused by fencing.
	ErrLeaseLost = errors.New("lease lost")
	// ErrReleased is the cause of [Held.Context] after [Held.Release].
	ErrReleased = errors.New("lease released")
	// ErrVanished comes with ErrLeaseLost when the watcher document was deleted under its owner.
	ErrVanished = errors.New("watcher document vanished")
	// ErrNotFound says that there is no watcher document of that id.
	ErrNotFound = errors.New("watcher document not found")
	// ErrCopiedState is what a *CopiedStateError is.
	ErrCopiedState = errors.New("copied state")
)

// CopiedStateError refuses a watcher document that was written on another replica set: its transactional ids may be in
// use there and its token means nothing here (N5).
type CopiedStateError struct {
	ID           string // of the watcher document
	Stored, Here string // replica set ids
}

func (e *CopiedStateError) Error() string {
	return fmt.Sprintf("the state of watcher %s was copied from another replica set (written on %s, this is %s): run `outrelay recover --adopt` to make it this one's", e.ID, e.Stored, e.Here)
}

// Is makes the error an [ErrCopiedState].
func (e *CopiedStateError) Is(target error) bool { return target == ErrCopiedState }

// errOutcomeUnknown marks the outcome of a write that the document does not show yet; the next attempt settles it.
var errOutcomeUnknown = errors.New("outcome not known yet")

// errNotOwner says that a transaction's fence matched nothing.
var errNotOwner = errors.New("the watcher document is not this owner's")

// Server codes that matter here, by number because texts change.
const (
	codeUnauthorized         = 13
	codeAuthenticationFailed = 18
	codeCommandNotFound      = 59
)

// resendCodes are the codes after which the same write is worth sending once more at once: the server was changing state, or
// had applied the write without a majority yet.
var resendCodes = []int{6, 7, 64, 89, 91, 189, 262, 9001, 10107, 11600, 11602, 13435, 13436}

func hasCode(err error, codes ...int) bool {
	var se mongo.ServerError
	if !errors.As(err, &se) {
		return false
	}
	for _, c := range codes {
		if se.HasErrorCode(c) {
			return true
		}
	}
	return false
}

// mayBeApplied reports whether a write that ended with err may have been applied, or would be if sent again now.
func mayBeApplied(err error) bool {
	if mongo.IsTimeout(err) {
		return false // the time of this call is spent
	}
	var we mongo.WriteException
	if errors.As(err, &we) && we.WriteConcernError != nil {
		return true
	}
	return mongo.IsNetworkError(err) || hasCode(err, resendCodes...)
}

// mayRetryTransaction reports whether a transaction that ended with err did nothing, or nothing known, and may run again.
func mayRetryTransaction(err error) bool {
	var le mongo.LabeledError
	if errors.As(err, &le) && (le.HasErrorLabel("TransientTransactionError") || le.HasErrorLabel("UnknownTransactionCommitResult")) {
		return true
	}
	return errors.Is(err, errOutcomeUnknown) || mongo.IsTimeout(err) || errors.Is(err, context.DeadlineExceeded) || mayBeApplied(err)
}

// adviceFor says what to do about an error that waiting alone does not heal.
func adviceFor(err error) string {
	switch {
	case hasCode(err, codeUnauthorized):
		return "grant find, insert, update and changeStream on the state database to the relay's user"
	case hasCode(err, codeAuthenticationFailed):
		return "check the user, the password and authSource of the MongoDB address"
	}
	return "waiting; nothing is lost meanwhile"
}
