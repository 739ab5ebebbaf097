package consumer

import (
	"fmt"

	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/pkg/consumer/deadletter"
)

// HandlerError describes a failed attempt for WithErrorHook.
type HandlerError struct {
	Handler string   // the handler's name; "" if there is no handler, and for records that could not be decoded
	Message *Message // as it was read; do not change it
	Attempt int      // 1 for the first
	Next    string   // what follows: "retry", "wait", "set_aside", "suspend", "retry_topic", "dead_letter" or "discard"
	Stack   []byte   // of a panic
	Err     error    // of the handler
}

func (e *HandlerError) Error() string {
	handler, message := e.Handler, e.Message
	if handler == "" {
		handler = "no handler"
	}
	place := recordPlace{message.Topic, message.Partition, message.Offset}
	return fmt.Sprintf("%s: message %s (%s, type %q), attempt %d, then %s: %v",
		handler, record.Clip(message.ID, maxReason), place, record.Clip(message.Name, maxReason), e.Attempt, e.Next, e.Err)
}

// Unwrap returns the handler's error.
func (e *HandlerError) Unwrap() error { return e.Err }

// GivenUp is a message that a handler, or the consumer for it, has given up: its dead letter is stored.
type GivenUp struct {
	ID       deadletter.ID // of the letter: the group, the handler, the topic, the partition, the offset and the message
	Name     string        // of the event
	Class    string        // the kind of failure, one of the classes of package deadletter
	Reason   string        // the error of the last attempt, clipped
	Attempts int
}

// panicError is a panic of a handler, a middleware, or other code that the user supplies.
type panicError struct {
	Value any
	Stack []byte
}

func (e *panicError) Error() string { return fmt.Sprintf("panic: %v", e.Value) }

// Unwrap returns ErrPanic, and the value of the panic if it is an error.
func (e *panicError) Unwrap() []error {
	if err, ok := e.Value.(error); ok {
		return []error{ErrPanic, err}
	}
	return []error{ErrPanic}
}
