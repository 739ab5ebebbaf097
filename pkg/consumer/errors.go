package consumer

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"
)

// What an error of this package is, to be asked for with errors.Is. Every typed error below is one of the four.
var (
	// ErrConfiguration says that the program is wrong: nothing changes until somebody changes it.
	ErrConfiguration = errors.New("configuration error")
	// ErrValidation says that a message or an event is not what it should be: another attempt ends the same way.
	ErrValidation = errors.New("validation error")
	// ErrOperational says that something was not to be had: another attempt may go well.
	ErrOperational = errors.New("operational error")
	// ErrHandler says that a handler returned an error.
	ErrHandler = errors.New("handler error")
)

// ErrorSink hears of every error that is not returned to anybody: one of the typed errors of this package. It is called
// from many goroutines and holds up whoever calls it.
type ErrorSink func(ctx context.Context, err error)

// Is reports ErrConfiguration.
func (e *DuplicateHandlerError) Is(target error) bool { return target == ErrConfiguration }

// Is reports ErrValidation.
func (e *DecodeError) Is(target error) bool { return target == ErrValidation }

// Is reports ErrHandler.
func (e *PanicError) Is(target error) bool { return target == ErrHandler }

// Is reports ErrHandler.
func (e *HandlerError) Is(target error) bool { return target == ErrHandler }

// UnsupportedError says that an operation needs a part that this consumer was made without. It is errors.ErrUnsupported
// as well.
type UnsupportedError struct {
	Operation string
	Needs     string // what to configure
}

func (e *UnsupportedError) Error() string {
	return fmt.Sprintf("%s is not supported here: it needs %s", e.Operation, e.Needs)
}

// Is reports ErrConfiguration and errors.ErrUnsupported.
func (e *UnsupportedError) Is(target error) bool {
	return target == ErrConfiguration || target == errors.ErrUnsupported
}

// BatchSizeError says that one call brought more events than the limit.
type BatchSizeError struct{ Size, Limit int }

func (e *BatchSizeError) Error() string {
	return fmt.Sprintf("a batch of %d events, the limit is %d; append it in parts", e.Size, e.Limit)
}

// Is reports ErrValidation.
func (e *BatchSizeError) Is(target error) bool { return target == ErrValidation }

// InvalidError lists what a validator found wrong with a message or an event. Problems never quote the body.
type InvalidError struct {
	ID, Type string
	Problems []string
	Err      error // of the validator; may be nil
}

func (e *InvalidError) Error() string {
	return fmt.Sprintf("message %s of type %q is invalid: %s", e.ID, e.Type, strings.Join(e.Problems, "; "))
}

// Is reports ErrValidation.
func (e *InvalidError) Is(target error) bool { return target == ErrValidation }

// Unwrap is the validator's error.
func (e *InvalidError) Unwrap() error { return e.Err }

// NoHandlerError says that no handler takes the type.
type NoHandlerError struct{ Type string }

func (e *NoHandlerError) Error() string { return fmt.Sprintf("no handler takes type %q", e.Type) }

// Is reports ErrNoHandler and ErrConfiguration.
func (e *NoHandlerError) Is(target error) bool {
	return target == ErrNoHandler || target == ErrConfiguration
}

// ExpiredError says that the message was worth something until Deadline only.
type ExpiredError struct{ Deadline time.Time }

func (e *ExpiredError) Error() string {
	return "the message expired at " + e.Deadline.UTC().Format(time.RFC3339Nano)
}

// Is reports ErrOperational.
func (e *ExpiredError) Is(target error) bool { return target == ErrOperational }

// NotDueError says that a message of a retry topic is to wait until Due.
type NotDueError struct{ Due time.Time }

func (e *NotDueError) Error() string {
	return "the retry is due at " + e.Due.UTC().Format(time.RFC3339Nano)
}

// Is reports ErrOperational.
func (e *NotDueError) Is(target error) bool { return target == ErrOperational }

// Wait is how long it has to wait.
func (e *NotDueError) Wait(now time.Time) time.Duration { return max(0, e.Due.Sub(now)) }

// Is reports ErrOperational.
func (e *TimeoutError) Is(target error) bool { return target == ErrOperational }

// LifetimeError says that MongoDB aborted the transaction of a single message twice while its handler ran: a transaction may
// be open for transactionLifetimeLimitSeconds, by default a minute. It does not unwrap to the driver's error, whose labels
// would make it look like an outage.
type LifetimeError struct {
	Handler string
	Ran     time.Duration // how long the handler took
	Reason  string        // how the transaction ended
}

func (e *LifetimeError) Error() string {
	return fmt.Sprintf("handler %s ran for %v, and MongoDB had aborted its transaction by then: let it do less, or take slow calls out of the transaction: %s",
		e.Handler, e.Ran.Round(time.Millisecond), e.Reason)
}

// Is reports ErrOperational.
func (e *LifetimeError) Is(target error) bool { return target == ErrOperational }

// BackpressureError says that a bound was reached and the caller is to come back later.
type BackpressureError struct {
	What  string // what is full
	Limit int
}

func (e *BackpressureError) Error() string {
	return fmt.Sprintf("%s is full (%d); try again later", e.What, e.Limit)
}

// Is reports ErrOperational.
func (e *BackpressureError) Is(target error) bool { return target == ErrOperational }

// MaintenanceError says that a task in the background failed: a sweep, an index. It runs again.
type MaintenanceError struct {
	Task string
	Err  error
}

func (e *MaintenanceError) Error() string { return e.Task + ": " + e.Err.Error() }

// Is reports ErrOperational.
func (e *MaintenanceError) Is(target error) bool { return target == ErrOperational }

// Unwrap is the task's error.
func (e *MaintenanceError) Unwrap() error { return e.Err }

// RetriesExhaustedError says that a message failed as often as its policy allows. Err is the last failure.
type RetriesExhaustedError struct {
	Attempts int
	Err      error
}

func (e *RetriesExhaustedError) Error() string {
	return fmt.Sprintf("given up after %d attempts: %s", e.Attempts, e.Err)
}

// Is reports ErrOperational.
func (e *RetriesExhaustedError) Is(target error) bool { return target == ErrOperational }

// Unwrap is the last failure.
func (e *RetriesExhaustedError) Unwrap() error { return e.Err }

// BreakerOpenError says that a circuit breaker lets nothing through before Until.
type BreakerOpenError struct {
	Name     string
	Until    time.Time
	Wait     time.Duration // from when it was said
	Consumer bool          // the whole consumer is to pause
}

func (e *BreakerOpenError) Error() string {
	return fmt.Sprintf("circuit breaker %q is open until %s", e.Name, e.Until.UTC().Format(time.RFC3339Nano))
}

// Is reports ErrOperational.
func (e *BreakerOpenError) Is(target error) bool { return target == ErrOperational }

// BlockedError says that an earlier message of the key is still to be handled.
type BlockedError struct{ Behind string } // id of that message

func (e *BlockedError) Error() string { return "message " + e.Behind + " of its key comes first" }

// Is reports ErrOperational.
func (e *BlockedError) Is(target error) bool { return target == ErrOperational }

// ErrUnfit says that a message can never be disposed of like this, whoever tries again: it is too large for a topic, or not
// legal there. The consumer then falls back to a dead letter, to a bare one (Verdict.Bare), and last of all lets the message
// pass with a *LostError. A Disposer and a LetterStore return errors that wrap it; every other error is tried again until it
// is gone.
var ErrUnfit = errors.New("the message cannot be stored like this")

// isUnfit reports whether a disposal that failed with err can never succeed.
func isUnfit(err error) bool {
	_, panicked := errors.AsType[*PanicError](err)
	_, unsupported := errors.AsType[*UnsupportedError](err)
	return panicked || unsupported || errors.Is(err, ErrUnfit)
}

// LostError says that not even a bare dead letter could be written of a message: it passed without a trace but this error.
// Its record is in the topic until retention removes it.
type LostError struct {
	Handler   string
	Topic     string
	Partition int32
	Offset    int64
	Err       error
}

func (e *LostError) Error() string {
	return fmt.Sprintf("message %s/%d/%d of handler %q is in no dead letter; read its record from the topic: %v", e.Topic, e.Partition, e.Offset, e.Handler, e.Err)
}

// Is reports ErrOperational.
func (e *LostError) Is(target error) bool { return target == ErrOperational }

// Unwrap is why the last attempt failed.
func (e *LostError) Unwrap() error { return e.Err }

// The classes of failures: a label of dead letters, and a filter.
const (
	ClassHandler   = "handler"
	ClassTimeout   = "timeout"
	ClassPanic     = "panic"
	ClassInvalid   = "invalid"
	ClassPoison    = "malformed"  // the record could not be decoded
	ClassNoHandler = "no_handler" // nobody takes the type
	ClassExpired   = "expired"
	ClassDatabase  = "database" // the database was not to be had, or refused for a while
	ClassDropped   = "dropped"
	ClassDuplicate = "duplicate"
	ClassBlocked   = "blocked"
	ClassBreaker   = "breaker"
	ClassNotDue    = "not_due"
)

// Class is the class of an error; ClassHandler for any that is not known.
func Class(err error) string {
	for _, c := range classes {
		if c.match(err) {
			return c.name
		}
	}
	return ClassHandler
}

// The first match wins: what the handler wrapped is looked at after what the consumer says of it.
var classes = []struct {
	name  string
	match Matcher
}{
	{ClassDropped, Is(ErrDrop)},
	{ClassDuplicate, isDuplicate},
	{ClassPoison, As[*DecodeError]()},
	{ClassNoHandler, Is(ErrNoHandler)},
	{ClassExpired, As[*ExpiredError]()},
	{ClassNotDue, As[*NotDueError]()},
	{ClassBlocked, As[*BlockedError]()},
	{ClassBreaker, As[*BreakerOpenError]()},
	{ClassPanic, As[*PanicError]()},
	{ClassTimeout, As[*TimeoutError]()},
	{ClassTimeout, As[*LifetimeError]()},
	{ClassInvalid, Is(ErrValidation)},
	{ClassDatabase, Transient()},
}

// maxReason bounds the text of a failure, in bytes.
const maxReason = 512

// errorText is the text of err, clipped.
func errorText(err error) string {
	if err == nil {
		return ""
	}
	return clip(err.Error(), maxReason)
}

// clip cuts s to n bytes of valid UTF-8.
func clip(s string, n int) string {
	if len(s) > n {
		s = s[:n]
	}
	return strings.ToValidUTF8(s, "\uFFFD")
}
