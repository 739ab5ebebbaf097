package consumer

import (
	"errors"
	"fmt"
	"time"

	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/service/inbox"
	"github.com/outrelay/outrelay/internal/service/transport"
	"github.com/outrelay/outrelay/pkg/consumer/deadletter"
)

// Errors, for errors.Is.
var (
	// ErrNoHandler reports that Run was called before Handle, or that no handler takes the type of a message.
	ErrNoHandler = errors.New("consumer: no handler")
	// ErrRunning reports that Run was called while the consumer runs.
	ErrRunning = errors.New("consumer: Run is running already")
	// ErrTimeout reports that a handler exceeded WithTimeout. The error of the handler is wrapped too.
	ErrTimeout = errors.New("consumer: the handler timed out")
	// ErrPanic reports that a handler, a middleware or another function of the user panicked, or ended its goroutine, as
	// runtime.Goexit and t.FailNow do. HandlerError.Stack has the stack.
	ErrPanic = errors.New("consumer: panic")
	// ErrMalformed reports that a record or its payload cannot be decoded or is invalid. Another attempt fails the same way, so
	// by default the message becomes a dead letter at once. Handlers may wrap it.
	ErrMalformed = errors.New("consumer: malformed message")
	// ErrExpired reports that the deadline of the message has passed.
	ErrExpired = errors.New("consumer: the message has expired")
	// ErrGap: a partition no longer has the next records. See WithHaltOnLoss.
	ErrGap = transport.ErrGap
)

// errAbandoned reports that a handler did not end within the drain. The next owner of the partition handles its messages
// again. The inbox rejects the messages that were committed after all.
var errAbandoned = errors.New("consumer: in flight when the time to drain was over")

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

// The classes of failures that no dead letter has. The others are in package deadletter.
const (
	classDuplicate = "duplicate"
	classNotDue    = "not_due"
	classDiscarded = "discarded" // by Discard or ThenDiscard
)

// classOf returns the class of an error. It returns ClassHandler for errors of handlers without another class.
func classOf(err error) string {
	for _, c := range classes {
		if c.match(err) {
			return c.name
		}
	}
	return deadletter.ClassHandler
}

// The first match wins. The consumer's own errors come first, because they can wrap errors of the handler.
var classes = []struct {
	name  string
	match func(err error) bool
}{
	{deadletter.ClassRejected, isRequest(requestReject)},
	{classDiscarded, isRequest(requestDiscard)},
	{classDuplicate, ErrorIs(inbox.ErrDuplicate)},
	{deadletter.ClassUnknown, ErrorIs(ErrNoHandler)},
	{deadletter.ClassExpired, isA[*expiredError]},
	{classNotDue, isA[*notDueError]},
	{deadletter.ClassPanic, isA[*panicError]},
	{deadletter.ClassTimeout, isA[*timeoutError]},
	{deadletter.ClassTimeout, isA[*lifetimeError]},
	{deadletter.ClassMalformed, ErrorIs(ErrMalformed)},
	{deadletter.ClassDatabase, isTransient},
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
	return record.Clip(err.Error(), maxReason)
}
