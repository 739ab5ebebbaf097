package consumer

import (
	"errors"
	"fmt"
	"time"

	"github.com/outrelay/outrelay/pkg/consumer/deadletter"
)

// request is a decision that a handler makes about its message, by the error that it returns.
type request uint8

const (
	requestRetry request = iota + 1
	requestSuspend
	requestReject
	requestDiscard
)

// requestError is the error of RetryIn, Suspend, Reject and Discard.
type requestError struct {
	request request
	delay   time.Duration
	err     error // may be nil
}

// RetryIn returns an error that makes the message be tried again after wait, regardless of Retry. It spends no attempt, but
// Retry.GiveUpAfter still applies. The message is set aside with its key, so other keys go on. err may be nil. It is
// reported and kept in the history of the message. A negative wait counts as 0.
func RetryIn(wait time.Duration, err error) error {
	return &requestError{request: requestRetry, delay: max(wait, 0), err: err}
}

// Suspend returns an error that makes this handler take no message for duration, in this process. Then it tries one waiting message,
// usually this message, and goes on if that succeeds. It spends no attempt. Use it if every message would fail: at a rate limit
// or in a maintenance window. A negative duration counts as 0.
func Suspend(duration time.Duration, err error) error {
	return &requestError{request: requestSuspend, delay: max(duration, 0), err: err}
}

// Reject returns an error that makes the message a dead letter at once. Use it for failures that another attempt cannot
// repair.
func Reject(err error) error { return &requestError{request: requestReject, err: err} }

// Discard returns an error that skips the message. The writes of the handler are rolled back. The message is counted and
// reported, and nothing is kept. To skip a message and keep the writes of the handler, return nil.
func Discard(err error) error { return &requestError{request: requestDiscard, err: err} }

// isRequest returns a function that reports whether an error is that request of a handler.
func isRequest(wanted request) func(err error) bool {
	return func(err error) bool {
		requestErr, ok := errors.AsType[*requestError](err)
		return ok && requestErr.request == wanted
	}
}

func (e *requestError) Error() string {
	text := ""
	switch e.request {
	case requestRetry:
		text = fmt.Sprintf("the handler requested a retry in %v", e.delay)
	case requestSuspend:
		text = fmt.Sprintf("the handler requested a suspension for %v", e.delay)
	case requestReject:
		text = "the handler rejected the message"
	case requestDiscard:
		text = "the handler discarded the message"
	}

	if e.err != nil {
		text += ": " + e.err.Error()
	}
	return text
}

// Unwrap returns the handler's error.
func (e *requestError) Unwrap() error { return e.err }

// GivesUp reports whether the handler gave the message up, for the circuit breaker.
func (e *requestError) GivesUp() bool {
	return e.request == requestReject || e.request == requestDiscard
}

// chooseVerdict returns the verdict that the handler requested. retry is the Retry for the error.
func (e *requestError) chooseVerdict(retry *Retry, failures failures) verdict {
	switch e.request {
	case requestReject:
		return verdict{Action: actDeadLetter, Reason: deadletter.ClassRejected}
	case requestDiscard:
		return verdict{Action: actDiscard, Reason: classDiscarded}
	default:
	}

	// A request does not extend the time after which the message is given up.
	if retry.isOverdue(failures) {
		return retry.giveUp()
	}
	verdict := verdict{Action: actAside, Delay: e.delay, Uncounted: true, Unordered: retry.Unordered}
	if e.request == requestSuspend {
		verdict.Action = actSuspend
	}
	return verdict
}
