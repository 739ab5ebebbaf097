package inbox

import (
	"errors"
	"fmt"
	"time"

	engine "github.com/outrelay/outrelay/internal/inbox"
)

// Errors of this package. Test for them with errors.Is.
var (
	// ErrDuplicate means that the key was handled before.
	ErrDuplicate = engine.ErrDuplicate

	// ErrInProgress means that another call is handling the key. The error is an *InProgressError.
	ErrInProgress = errors.New("another call is handling the key")

	// ErrClaimLost means that the claim of WithClaim expired before fn ended. Nothing was committed.
	ErrClaimLost = engine.ErrClaimLost

	// ErrInvalid means that a key or an option is invalid, or that WithClaim was used in a transaction.
	ErrInvalid = engine.ErrInvalid
)

// InProgressError reports a key that another call is handling. It wraps ErrInProgress.
type InProgressError struct {
	// Key is the key.
	Key Key

	// Until is the end of the other call's claim, by the server's clock, unless that call renews it. It
	// is zero if the other call has no claim.
	Until time.Time
}

// Error names the key and the end of the claim.
func (e *InProgressError) Error() string {
	if e.Until.IsZero() {
		return fmt.Sprintf("%v: %v", ErrInProgress, e.Key)
	}
	return fmt.Sprintf("%v: %v until %s", ErrInProgress, e.Key, e.Until.UTC().Format(time.RFC3339Nano))
}

// Unwrap returns ErrInProgress.
func (e *InProgressError) Unwrap() error { return ErrInProgress }

// translate replaces an error of the engine for the key by an *InProgressError. It returns the error of
// fn as it is: an error of fn may be that of another key.
func translate(err error, k Key, e engine.Entry) error {
	if claimed, ok := errors.AsType[*engine.ClaimedError](err); ok && claimed.Key == e.Key {
		return &InProgressError{Key: k, Until: claimed.Until}
	}
	if busy, ok := errors.AsType[*engine.BusyError](err); ok && busy.Key == e.Key {
		return &InProgressError{Key: k}
	}
	return err
}
