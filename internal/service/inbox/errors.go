package inbox

import (
	"errors"
	"fmt"
	"time"
)

// Errors returned by this package. Test for them with errors.Is.
var (
	// ErrDuplicate means that the message was handled before. The error is a *DuplicateError.
	ErrDuplicate = errors.New("handled before")

	// ErrInProgress means that another call is handling the message. The error is an
	// *InProgressError.
	ErrInProgress = errors.New("being handled by another call")

	// ErrClaimLost means that a claim is no longer held: its lease expired and another holder
	// claimed the message, or it was released.
	ErrClaimLost = errors.New("claim lost")

	// ErrRecreated means that a watermark belongs to a deleted topic with the same name, or that
	// the topic lost records.
	ErrRecreated = errors.New("topic was recreated or lost records")

	// ErrUnconfirmed means that a topic seems to have been recreated or truncated. Read the end
	// offset and the leader epoch again, and call Attach with the new values.
	ErrUnconfirmed = errors.New("read the partition's end again and attach again")

	// ErrStale means that another process has begun a new generation of the partition. Records that this process has
	// fetched may belong to a deleted topic: drop them and call Attach again.
	ErrStale = errors.New("a newer generation of the partition has begun")

	// ErrMarked means that AdmitNew got an entry that has a marker. Admit decides about it in a new transaction.
	ErrMarked = errors.New("a message has a marker")

	// ErrInvalid means that an entry or an argument is invalid.
	ErrInvalid = errors.New("invalid argument")

	// ErrInTransaction means that Claim was called in a running transaction. A claim must stay if
	// that transaction rolls back. It wraps ErrInvalid.
	ErrInTransaction = fmt.Errorf("%w: a claim must be committed before the handler's transaction begins: call Claim outside of it", ErrInvalid)
)

// DuplicateError reports a message that was handled before. It wraps ErrDuplicate.
type DuplicateError struct{ Key Key }

func (e *DuplicateError) Error() string { return fmt.Sprintf("%s: %s", ErrDuplicate, e.Key) }

// Unwrap returns ErrDuplicate.
func (e *DuplicateError) Unwrap() error { return ErrDuplicate }

// InProgressError reports a message that another call is handling. It wraps ErrInProgress.
type InProgressError struct {
	// Key is the identity of the message.
	Key Key

	// Until is the end of the other call's lease by the server's clock, unless the holder renews it.
	// It is zero if the other call belongs to this process.
	Until time.Time
}

func (e *InProgressError) Error() string {
	if e.Until.IsZero() {
		return fmt.Sprintf("%s: %s", ErrInProgress, e.Key)
	}
	return fmt.Sprintf("%s: %s until %s", ErrInProgress, e.Key, e.Until.UTC().Format(time.RFC3339Nano))
}

// Unwrap returns ErrInProgress.
func (e *InProgressError) Unwrap() error { return ErrInProgress }
