package outbox

import (
	"errors"
	"fmt"

	"github.com/outrelay/outrelay/pkg/event"

	"github.com/outrelay/outrelay/internal/unit"
)

// Errors returned by this package. Test for them with errors.Is.
var (
	// ErrNoTransaction means that the context has no running transaction. An event that is stored
	// outside of the business transaction can be lost, or can report a write that was rolled back.
	// WithoutTransaction allows it.
	ErrNoTransaction = errors.New("no running transaction in this context: use the context that the transaction's callback gets")

	// ErrTooLarge means that an envelope exceeds the configured size. The error is a
	// *TooLargeError.
	ErrTooLarge = errors.New("envelope too large")

	// ErrNotScheduled means that Cancel or Reschedule found no envelope with this id that still
	// waits: it was never scheduled, it was canceled, or a watcher is sending it already.
	ErrNotScheduled = errors.New("not scheduled, or on its way already")

	// ErrRollbackOnly means that the transaction cannot commit, because an operation in it failed
	// and the callback continued. The cause is wrapped as well.
	ErrRollbackOnly = unit.ErrRollbackOnly

	// ErrTransactionEnded means that the transaction of this context is over: the callback has
	// returned, or it has committed or aborted the transaction of Transaction itself.
	ErrTransactionEnded = unit.ErrEnded
)

// CommitError reports that the callback of a transaction succeeded, but the commit failed.
type CommitError struct {
	// Unknown is true if the transaction may have been committed nevertheless. Before you repeat
	// it, check for its writes, or make sure that repeating it is harmless. If Unknown is false,
	// nothing of the transaction was stored.
	Unknown bool

	// Err is the error of the driver.
	Err error
}

func (e *CommitError) Error() string {
	if e.Unknown {
		return fmt.Sprintf("committing: the outcome is unknown, the transaction may have been committed: %v", e.Err)
	}
	return fmt.Sprintf("committing: nothing of the transaction was stored: %v", e.Err)
}

// Unwrap returns the error of the driver.
func (e *CommitError) Unwrap() error { return e.Err }

// TooLargeError reports an envelope that exceeds the size limit of its Box. It wraps ErrTooLarge.
type TooLargeError struct {
	// ID identifies the event.
	ID event.ID

	// Size is the size of the envelope, and Limit the largest allowed size. Both are in bytes.
	Size, Limit int
}

func (e *TooLargeError) Error() string {
	return fmt.Sprintf("%s: event %s has %d bytes, the limit is %d; "+
		"store the body elsewhere and send a reference, or raise WithMaxSize and the topic's max.message.bytes",
		ErrTooLarge, e.ID, e.Size, e.Limit)
}

// Unwrap returns ErrTooLarge.
func (e *TooLargeError) Unwrap() error { return ErrTooLarge }
