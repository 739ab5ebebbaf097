package outbox

import (
	"errors"
	"fmt"

	"github.com/outrelay/outrelay/pkg/event"
)

// What calls answer, to be asked for with errors.Is.
var (
	// ErrNoTransaction says that Append got a context without a running transaction. An event outside of the business
	// write's transaction can be lost or be a lie; WithoutTransaction allows it.
	ErrNoTransaction = errors.New("no running transaction in this context: use the context that the transaction's callback gets")
	// ErrTooLarge says that an envelope is above the configured size; the error is a *TooLargeError.
	ErrTooLarge = errors.New("envelope too large")
	// ErrNotScheduled says that Cancel or Reschedule found no scheduled envelope of that id that is still to be had: it
	// never was, it was cancelled, or it is on its way already.
	ErrNotScheduled = errors.New("not scheduled, or on its way already")
	// ErrRollbackOnly says that a transaction cannot commit, because something inside it failed although the callback
	// went on. The cause is wrapped too.
	ErrRollbackOnly = errors.New("transaction is rollback-only")
	// ErrTransactionEnded says that the transaction of this context is over: the callback has returned, or has itself
	// committed or aborted what Transaction was to commit.
	ErrTransactionEnded = errors.New("transaction has ended")
)

// CommitError says that a transaction whose callback succeeded could not be committed.
type CommitError struct {
	// Unknown says that the transaction may have been committed nevertheless: look for what it wrote before doing it again,
	// or do it again only if that has no further effect. Otherwise nothing of it was stored.
	Unknown bool
	Err     error // of the driver
}

func (e *CommitError) Error() string {
	if e.Unknown {
		return fmt.Sprintf("committing: it is unknown whether the transaction was committed: %v", e.Err)
	}
	return fmt.Sprintf("committing: nothing of the transaction was stored: %v", e.Err)
}

// Unwrap is the driver's error.
func (e *CommitError) Unwrap() error { return e.Err }

// TooLargeError is ErrTooLarge with the sizes in bytes.
type TooLargeError struct {
	ID          event.ID
	Size, Limit int
}

func (e *TooLargeError) Error() string {
	return fmt.Sprintf("%s: event %s has %d bytes, the limit is %d; keep the body elsewhere and send a reference, or raise WithMaxSize and the topic's max.message.bytes",
		ErrTooLarge, e.ID, e.Size, e.Limit)
}

// Unwrap is ErrTooLarge.
func (e *TooLargeError) Unwrap() error { return ErrTooLarge }
