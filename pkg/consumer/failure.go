package consumer

import (
	"errors"
	"fmt"
)

var (
	// ErrNoHandler says that no handler takes a message's type; it is the cause of its being parked. Run returns it if
	// there is no handler at all.
	ErrNoHandler = errors.New("consumer: no handler")
	// ErrRunning says that the consumer runs already.
	ErrRunning = errors.New("consumer: Run is running already")
	// ErrAbandoned says that a handler did not end within the drain: its messages are handled again by whoever has their
	// partition next, which refuses those that were committed after all.
	ErrAbandoned = errors.New("consumer: in flight when the time to drain was over")
)

// DuplicateHandlerError says that a strict consumer has a handler for the type already, or any consumer one of that name.
type DuplicateHandlerError struct {
	Pattern string // the one that was refused; "" if the name was
	Name    string // of the handler that is there
}

func (e *DuplicateHandlerError) Error() string {
	if e.Pattern == "" {
		return fmt.Sprintf("a handler named %q is registered already: name this one with Named", e.Name)
	}
	return fmt.Sprintf("handler %q takes types of %q already, and the consumer is strict: one handler for a type", e.Name, e.Pattern)
}

// HandlerError is a failure of a handler, as OnError gets it.
type HandlerError struct {
	Handler   string // its name; "" for no handler and for records that could not be decoded
	Topic     string
	Partition int32
	Offset    int64
	ID, Type  string
	Attempts  Attempts
	Verdict   Verdict
	Err       error
}

func (e *HandlerError) Error() string {
	h := e.Handler
	if h == "" {
		h = "no handler"
	}
	return fmt.Sprintf("%s: message %s (%s/%d/%d, type %q), attempt %d, then %s: %v", h, clip(e.ID, maxReason), e.Topic, e.Partition, e.Offset, clip(e.Type, maxReason),
		e.Attempts.Total, e.Verdict.Action, e.Err)
}

// Unwrap is what the handler returned.
func (e *HandlerError) Unwrap() error { return e.Err }

// PanicError is a panic of a handler or a middleware.
type PanicError struct {
	Value any
	Stack []byte
}

func (e *PanicError) Error() string { return fmt.Sprintf("panic: %v", e.Value) }

// Unwrap is the value, if it is an error.
func (e *PanicError) Unwrap() error {
	err, _ := e.Value.(error)
	return err
}
