package consumer

import (
	"errors"
	"fmt"
)

var (
	// ErrNoHandler reports that no handler is registered for the type of a message. Run returns
	// ErrNoHandler if there is no handler at all.
	ErrNoHandler = errors.New("consumer: no handler")
	// ErrRunning reports that Run was called while the consumer runs.
	ErrRunning = errors.New("consumer: Run is running already")
	// ErrAbandoned reports that a handler did not end within the drain. The next owner of the partition handles its messages
	// again. The inbox rejects the messages that were committed after all.
	ErrAbandoned = errors.New("consumer: in flight when the time to drain was over")
)

// HandlerError describes a failed attempt for WithErrorHook.
type HandlerError struct {
	Handler string   // the handler's name; "" if there is no handler, and for records that could not be decoded
	Message *Message // as it was read; do not change it
	Attempt int      // 1 for the first
	Next    string   // what follows: "retry", "wait", "aside", "suspend", "retry_topic", "dead_letter" or "discard"
	Err     error    // of the handler
}

func (e *HandlerError) Error() string {
	handler, m := e.Handler, e.Message
	if handler == "" {
		handler = "no handler"
	}
	return fmt.Sprintf("%s: message %s (%s/%d/%d, type %q), attempt %d, then %s: %v",
		handler, clip(m.ID, maxReason), m.Topic, m.Partition, m.Offset, clip(m.Name, maxReason), e.Attempt, e.Next, e.Err)
}

// Unwrap returns the handler's error.
func (e *HandlerError) Unwrap() error { return e.Err }

// PanicError is a panic of a handler, a middleware, or other code that the user supplies.
type PanicError struct {
	Value any
	Stack []byte
}

func (e *PanicError) Error() string { return fmt.Sprintf("panic: %v", e.Value) }

// Unwrap returns the value of the panic if it is an error, otherwise nil.
func (e *PanicError) Unwrap() error {
	err, _ := e.Value.(error)
	return err
}
