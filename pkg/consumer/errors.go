package consumer

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/outrelay/outrelay/internal/inbox"
)

// The categories of errors. Test with errors.Is. Every typed error of this package belongs to one of the four.
var (
	// ErrConfiguration reports a mistake in the program or its configuration. Another attempt fails the same way.
	ErrConfiguration = errors.New("configuration error")
	// ErrValidation reports an invalid message or event. Another attempt fails the same way.
	ErrValidation = errors.New("validation error")
	// ErrOperational reports that a resource was unavailable. Another attempt may succeed.
	ErrOperational = errors.New("operational error")
	// ErrHandler reports that a handler failed.
	ErrHandler = errors.New("handler error")
)

// ErrorSink receives every error that no call returns. The errors are typed errors of this package. An ErrorSink is called
// from many goroutines. The caller waits for it, so it should return fast.
type ErrorSink func(ctx context.Context, err error)

// Is reports ErrValidation.
func (e *DecodeError) Is(target error) bool { return target == ErrValidation }

// Is reports ErrHandler.
func (e *PanicError) Is(target error) bool { return target == ErrHandler }

// Is reports ErrHandler.
func (e *HandlerError) Is(target error) bool { return target == ErrHandler }

// UnsupportedError reports that an operation needs a part that is not configured. It also matches errors.ErrUnsupported.
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

// InvalidError lists the problems that a validator found in a message or an event. Problems never quote the body.
type InvalidError struct {
	ID, Type string
	Problems []string
	Err      error // the validator's error; may be nil
}

func (e *InvalidError) Error() string {
	return fmt.Sprintf("message %s of type %q is invalid: %s", e.ID, e.Type, strings.Join(e.Problems, "; "))
}

// Is reports ErrValidation.
func (e *InvalidError) Is(target error) bool { return target == ErrValidation }

// Unwrap returns the validator's error.
func (e *InvalidError) Unwrap() error { return e.Err }

// NoHandlerError reports that no handler is registered for the type.
type NoHandlerError struct{ Type string }

func (e *NoHandlerError) Error() string { return fmt.Sprintf("no handler takes type %q", e.Type) }

// Is reports ErrNoHandler and ErrConfiguration.
func (e *NoHandlerError) Is(target error) bool {
	return target == ErrNoHandler || target == ErrConfiguration
}

// ExpiredError reports that the deadline of the message has passed.
type ExpiredError struct{ Deadline time.Time }

func (e *ExpiredError) Error() string {
	return "the message expired at " + e.Deadline.UTC().Format(time.RFC3339Nano)
}

// Is reports ErrOperational.
func (e *ExpiredError) Is(target error) bool { return target == ErrOperational }

// NotDueError reports that a message of a retry topic must wait until Due.
type NotDueError struct{ Due time.Time }

func (e *NotDueError) Error() string {
	return "the retry is due at " + e.Due.UTC().Format(time.RFC3339Nano)
}

// Is reports ErrOperational.
func (e *NotDueError) Is(target error) bool { return target == ErrOperational }

// Wait returns how long the message must wait, or 0 if it is due.
func (e *NotDueError) Wait(now time.Time) time.Duration { return max(0, e.Due.Sub(now)) }

// Is reports ErrOperational.
func (e *TimeoutError) Is(target error) bool { return target == ErrOperational }

// LifetimeError reports that MongoDB twice aborted the transaction of a single message while its handler ran. A transaction
// may be open for transactionLifetimeLimitSeconds, by default a minute. LifetimeError does not unwrap to the driver's error,
// because the labels of that error would make it look like an outage.
type LifetimeError struct {
	Handler string
	Ran     time.Duration // how long the handler took
	Reason  string        // how the transaction ended
}

func (e *LifetimeError) Error() string {
	return fmt.Sprintf("handler %s ran for %v, and MongoDB aborted its transaction: "+
		"let it do less, or move slow calls out of the transaction: %s",
		e.Handler, e.Ran.Round(time.Millisecond), e.Reason)
}

// Is reports ErrOperational.
func (e *LifetimeError) Is(target error) bool { return target == ErrOperational }

// MaintenanceError reports that a background task, such as a sweep or an index build, failed. The task runs again.
type MaintenanceError struct {
	Task string
	Err  error
}

func (e *MaintenanceError) Error() string { return e.Task + ": " + e.Err.Error() }

// Is reports ErrOperational.
func (e *MaintenanceError) Is(target error) bool { return target == ErrOperational }

// Unwrap returns the task's error.
func (e *MaintenanceError) Unwrap() error { return e.Err }

// RetriesExhaustedError reports that a message has used up its attempts. Err is the last failure.
type RetriesExhaustedError struct {
	Attempts int
	Err      error
}

func (e *RetriesExhaustedError) Error() string {
	return fmt.Sprintf("given up after %d attempts: %s", e.Attempts, e.Err)
}

// Is reports ErrOperational.
func (e *RetriesExhaustedError) Is(target error) bool { return target == ErrOperational }

// Unwrap returns the last failure.
func (e *RetriesExhaustedError) Unwrap() error { return e.Err }

// ErrUnfit reports that a message can never be stored in this form: it is too large for a topic, or the topic rejects it. The
// consumer then tries a dead letter, and after that a bare dead letter without content. If that fails too, the message passes
// with a *LostError. A LetterStore returns errors that wrap ErrUnfit. The consumer repeats the call after every
// other error until it succeeds.
var ErrUnfit = errors.New("the message cannot be stored like this")

// isUnfit reports whether a disposal that failed with err can never succeed. Panics count, because they would repeat.
func isUnfit(err error) bool {
	_, panicked := errors.AsType[*PanicError](err)
	_, unsupported := errors.AsType[*UnsupportedError](err)
	return panicked || unsupported || errors.Is(err, ErrUnfit)
}

// LostError reports that no dead letter could be written for a message, not even a bare one. The message passed, and this
// error is its only trace. Its record is in the topic until retention removes it.
type LostError struct {
	Handler   string
	Topic     string
	Partition int32
	Offset    int64
	Err       error
}

func (e *LostError) Error() string {
	return fmt.Sprintf("message %s/%d/%d of handler %q is in no dead letter; read its record from the topic: %v",
		e.Topic, e.Partition, e.Offset, e.Handler, e.Err)
}

// Is reports ErrOperational.
func (e *LostError) Is(target error) bool { return target == ErrOperational }

// Unwrap returns the error of the last attempt to write a letter.
func (e *LostError) Unwrap() error { return e.Err }

// The classes of failures. Dead letters are labeled with them, and can be filtered by them.
const (
	ClassHandler   = "handler"
	ClassTimeout   = "timeout"
	ClassPanic     = "panic"
	ClassInvalid   = "invalid"
	ClassPoison    = "malformed"  // the record could not be decoded
	ClassNoHandler = "no_handler" // no handler is registered for the type
	ClassExpired   = "expired"
	ClassDatabase  = "database" // the database was unavailable, or rejected requests for a while
	ClassDuplicate = "duplicate"
	ClassNotDue    = "not_due"
	ClassRejected  = "rejected"  // by Reject
	ClassDiscarded = "discarded" // by Discard or ThenDiscard
)

// Class returns the class of an error. It returns ClassHandler for errors of handlers without another class.
func Class(err error) string {
	for _, c := range classes {
		if c.match(err) {
			return c.name
		}
	}
	return ClassHandler
}

// The first match wins. The consumer's own errors come first, because they can wrap errors of the handler.
var classes = []struct {
	name  string
	match func(err error) bool
}{
	{ClassDuplicate, ErrorIs(inbox.ErrDuplicate)},
	{ClassPoison, isA[*DecodeError]},
	{ClassNoHandler, ErrorIs(ErrNoHandler)},
	{ClassExpired, isA[*ExpiredError]},
	{ClassNotDue, isA[*NotDueError]},
	{ClassPanic, isA[*PanicError]},
	{ClassTimeout, isA[*TimeoutError]},
	{ClassTimeout, isA[*LifetimeError]},
	{ClassInvalid, ErrorIs(ErrValidation)},
	{ClassDatabase, isTransient},
}

// isA reports whether err is or wraps an E.
func isA[E error](err error) bool {
	_, ok := errors.AsType[E](err)
	return ok
}

// maxReason is the maximum length of the text of a failure, in bytes.
const maxReason = 512

// errorText returns the text of err, clipped to maxReason, or "" if err is nil.
func errorText(err error) string {
	if err == nil {
		return ""
	}
	return clip(err.Error(), maxReason)
}

// clip returns at most the first n bytes of s, with invalid UTF-8 replaced.
func clip(s string, n int) string {
	if len(s) > n {
		s = s[:n]
	}
	return strings.ToValidUTF8(s, "\uFFFD")
}
