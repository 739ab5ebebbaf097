package inbox

import (
	"errors"
	"fmt"
	"time"

	engine "github.com/outrelay/outrelay/internal/service/inbox"
)

// Errors of this package. Test for them with errors.Is.
var (
	// ErrDuplicate means that the key was handled before.
	ErrDuplicate = engine.ErrDuplicate

	// ErrInProgress means that another call is handling the key. The error is an *InProgressError.
	ErrInProgress = engine.ErrInProgress

	// ErrClaimLost means that the claim of WithClaim expired before fn ended. Nothing was committed.
	ErrClaimLost = engine.ErrClaimLost

	// ErrMismatch means that the key of OnceValue was handled with another fingerprint.
	ErrMismatch = errors.New("the key was used before for something else")

	// ErrNoResult means that the key of OnceValue was handled before, but no result was stored.
	ErrNoResult = errors.New("handled before by a call that stored no result")

	// ErrResultTooLarge means that the result of OnceValue is larger than MaxResult. Nothing was committed.
	ErrResultTooLarge = errors.New("the result is too large to be stored")

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
		return fmt.Sprintf("%v: %s", ErrInProgress, e.Key.describe())
	}
	return fmt.Sprintf("%v: %s until %s", ErrInProgress, e.Key.describe(), e.Until.UTC().Format(time.RFC3339Nano))
}

// Unwrap returns ErrInProgress.
func (e *InProgressError) Unwrap() error { return ErrInProgress }

// translate replaces an error of the engine for the key by one that has the key. It returns the error
// of fn as it is: an error of fn may be that of another key.
func translate(err error, key Key, engineKey engine.Key) error {
	if progress, ok := errors.AsType[*engine.InProgressError](err); ok && progress.Key == engineKey {
		return &InProgressError{Key: key, Until: progress.Until}
	}
	if dup, ok := errors.AsType[*engine.DuplicateError](err); ok && dup.Key == engineKey {
		return fmt.Errorf("%w: %s", ErrDuplicate, key.describe())
	}
	return err
}
