package consumer

import (
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/outrelay/outrelay/internal/inbox"
	"github.com/outrelay/outrelay/internal/transport"
)

// Errors, for errors.Is.
var (
	// ErrNoHandler reports that Run was called before Handle, or that no handler takes the type of a message.
	ErrNoHandler = errors.New("consumer: no handler")
	// ErrRunning reports that Run was called while the consumer runs.
	ErrRunning = errors.New("consumer: Run is running already")
	// ErrTimeout reports that a handler exceeded WithTimeout. The error of the handler is wrapped too.
	ErrTimeout = errors.New("consumer: the handler timed out")
	// ErrPanic reports that a handler, a middleware or another function of the user panicked. HandlerError.Stack has the stack.
	ErrPanic = errors.New("consumer: panic")
	// ErrMalformed reports that a record or its payload cannot be decoded or is invalid. Another attempt fails the same way, so
	// by default the message becomes a dead letter at once. Handlers may wrap it.
	ErrMalformed = errors.New("consumer: malformed message")
	// ErrExpired reports that the deadline of the message has passed.
	ErrExpired = errors.New("consumer: the message has expired")
	// ErrGap: a partition no longer has the next records. See WithHaltOnGap.
	ErrGap = transport.ErrGap
)

// errAbandoned reports that a handler did not end within the drain. The next owner of the partition handles its messages
// again. The inbox rejects the messages that were committed after all.
var errAbandoned = errors.New("consumer: in flight when the time to drain was over")

// unsupportedError reports that an operation needs a part that is not configured. It also matches errors.ErrUnsupported.
type unsupportedError struct {
	Operation string
	Needs     string // what to configure
}

func (e *unsupportedError) Error() string {
	return fmt.Sprintf("%s is not supported here: it needs %s", e.Operation, e.Needs)
}

// Is reports errors.ErrUnsupported.
func (e *unsupportedError) Is(target error) bool { return target == errors.ErrUnsupported }

// invalidError lists the problems that a validator found in a message or an event. Problems never quote the body.
type invalidError struct {
	ID, Type string
	Problems []string
	Err      error // the validator's error; may be nil
}

func (e *invalidError) Error() string {
	return fmt.Sprintf("message %s of type %q is invalid: %s", e.ID, e.Type, strings.Join(e.Problems, "; "))
}

// Is reports ErrMalformed.
func (e *invalidError) Is(target error) bool { return target == ErrMalformed }

// Unwrap returns the validator's error.
func (e *invalidError) Unwrap() error { return e.Err }

// noHandlerError reports that no handler is registered for the type.
type noHandlerError struct{ Type string }

func (e *noHandlerError) Error() string { return fmt.Sprintf("no handler takes type %q", e.Type) }

// Is reports ErrNoHandler.
func (e *noHandlerError) Is(target error) bool { return target == ErrNoHandler }

// expiredError reports that the deadline of the message has passed.
type expiredError struct{ Deadline time.Time }

// Is reports ErrExpired.
func (e *expiredError) Is(target error) bool { return target == ErrExpired }

func (e *expiredError) Error() string {
	return "the message expired at " + e.Deadline.UTC().Format(time.RFC3339Nano)
}

// notDueError reports that a message of a retry topic must wait until Due.
type notDueError struct{ Due time.Time }

func (e *notDueError) Error() string {
	return "the retry is due at " + e.Due.UTC().Format(time.RFC3339Nano)
}

// Wait returns how long the message must wait, or 0 if it is due.
func (e *notDueError) Wait(now time.Time) time.Duration { return max(0, e.Due.Sub(now)) }

// lifetimeError reports that MongoDB twice aborted the transaction of a single message while its handler ran. A transaction
// may be open for transactionLifetimeLimitSeconds, by default a minute. lifetimeError does not unwrap to the driver's error,
// because the labels of that error would make it look like an outage.
type lifetimeError struct {
	Handler string
	Ran     time.Duration // how long the handler took
	Reason  string        // how the transaction ended
}

// Is reports ErrTimeout.
func (e *lifetimeError) Is(target error) bool { return target == ErrTimeout }

func (e *lifetimeError) Error() string {
	return fmt.Sprintf("handler %s ran for %v, and MongoDB aborted its transaction: "+
		"let it do less, or move slow calls out of the transaction: %s",
		e.Handler, e.Ran.Round(time.Millisecond), e.Reason)
}

// maintenanceError reports that a background task, such as a sweep or an index build, failed. The task runs again.
type maintenanceError struct {
	Task string
	Err  error
}

func (e *maintenanceError) Error() string { return e.Task + ": " + e.Err.Error() }

// Unwrap returns the task's error.
func (e *maintenanceError) Unwrap() error { return e.Err }

// retriesExhaustedError reports that a message has used up its attempts. Err is the last failure.
type retriesExhaustedError struct {
	Attempts int
	Err      error
}

func (e *retriesExhaustedError) Error() string {
	return fmt.Sprintf("given up after %d attempts: %s", e.Attempts, e.Err)
}

// Unwrap returns the last failure.
func (e *retriesExhaustedError) Unwrap() error { return e.Err }

// ErrUnfit reports that a message can never be stored in this form: it is too large for a topic, or the topic rejects it. The
// consumer then tries a dead letter, and after that a bare dead letter without content. If that fails too, the message passes
// with a *lostError. A LetterStore returns errors that wrap ErrUnfit. The consumer repeats the call after every
// other error until it succeeds.
var ErrUnfit = errors.New("the message cannot be stored like this")

// isUnfit reports whether a disposal that failed with err can never succeed. Panics count, because they would repeat.
func isUnfit(err error) bool {
	_, panicked := errors.AsType[*panicError](err)
	_, unsupported := errors.AsType[*unsupportedError](err)
	return panicked || unsupported || errors.Is(err, ErrUnfit)
}

// lostError reports that no dead letter could be written for a message, not even a bare one. The message passed, and this
// error is its only trace. Its record is in the topic until retention removes it.
type lostError struct {
	Handler   string
	Topic     string
	Partition int32
	Offset    int64
	Err       error
}

func (e *lostError) Error() string {
	return fmt.Sprintf("message %s/%d/%d of handler %q is in no dead letter; read its record from the topic: %v",
		e.Topic, e.Partition, e.Offset, e.Handler, e.Err)
}

// Unwrap returns the error of the last attempt to write a letter.
func (e *lostError) Unwrap() error { return e.Err }

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
	{ClassPoison, isA[*decodeError]},
	{ClassNoHandler, ErrorIs(ErrNoHandler)},
	{ClassExpired, isA[*expiredError]},
	{ClassNotDue, isA[*notDueError]},
	{ClassPanic, isA[*panicError]},
	{ClassTimeout, isA[*timeoutError]},
	{ClassTimeout, isA[*lifetimeError]},
	{ClassInvalid, ErrorIs(ErrMalformed)},
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
