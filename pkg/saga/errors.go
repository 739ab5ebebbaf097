package saga

import (
	"errors"
	"fmt"
	"strings"
)

// What calls answer, to be asked for with errors.Is.
var (
	// ErrNoSagaID says that neither the correlation function nor the header saga-id says which saga a message is for. A
	// correlation function may return it to leave the decision to the header.
	ErrNoSagaID = errors.New("no saga id")
	// ErrNotFound says that a message is for a saga that is not there; the error is a *NotFoundError.
	ErrNotFound = errors.New("saga not found")
	// ErrConflict says that another step of the saga was committed meanwhile; the error is a *ConflictError. The message
	// is to be handled again from its start, in a new transaction.
	ErrConflict = errors.New("saga was changed meanwhile")
	// ErrDuplicateSaga says that a saga of that name exists; the error is a *DuplicateSagaError or an *OwnerError.
	ErrDuplicateSaga = errors.New("saga name is taken")
	// ErrGap says that more messages wait for an earlier one than may be held; the error is a *GapError.
	ErrGap = errors.New("too many messages wait for an earlier one")
	// ErrPayload says that a message's value is not what its callback takes; the error is a *PayloadError.
	ErrPayload = errors.New("payload cannot be decoded")
	// ErrID says that a text is no id of the saga's kind; the error is an *IDError.
	ErrID = errors.New("not an id of this saga")
	// ErrNoOutbox says that a step emits an event, and the registry has no outbox: WithOutbox gives it one.
	ErrNoOutbox = errors.New("the saga registry has no outbox")
	// ErrNoStep says that Emit was called with a context that no running step of a saga has made.
	ErrNoStep = errors.New("no running saga step in this context")
	// ErrDefinition says that a saga is not defined well; the error is a *DefinitionError.
	ErrDefinition = errors.New("saga definition is wrong")
	// ErrUnknownMessage says that a saga got a message of a type that it takes no part in.
	ErrUnknownMessage = errors.New("saga does not handle this type of message")
)

// CorrelationError is ErrNoSagaID with the message that has none.
type CorrelationError struct {
	Saga, Type, Message string
	Err                 error // what the correlation function or the header's text caused; nil if there was nothing
}

func (e *CorrelationError) Error() string {
	why := "its correlation function found none and it has no header " + HeaderID
	if e.Err != nil {
		why = e.Err.Error()
	}
	return fmt.Sprintf("%s: message %s of type %s for saga %s: %s", ErrNoSagaID, e.Message, e.Type, e.Saga, why)
}

// Unwrap is ErrNoSagaID and the cause.
func (e *CorrelationError) Unwrap() []error { return []error{ErrNoSagaID, e.Err} }

// NotFoundError is ErrNotFound with the saga and the message.
type NotFoundError struct{ Saga, ID, Type, Message string }

func (e *NotFoundError) Error() string {
	return fmt.Sprintf("%s: %s %s, asked for by message %s of type %s, which starts none; give the type a NotFound callback if that may happen",
		ErrNotFound, e.Saga, e.ID, e.Message, e.Type)
}

// Unwrap is ErrNotFound.
func (e *NotFoundError) Unwrap() error { return ErrNotFound }

// ConflictError is ErrConflict with the saga and the version on which the refused change was based: 0 is a start.
type ConflictError struct {
	Saga, ID string
	Version  int64
	Err      error // the server's error with its labels, if the conflict was one for the server
}

func (e *ConflictError) Error() string {
	text := fmt.Sprintf("%s: %s %s at version %d", ErrConflict, e.Saga, e.ID, e.Version)
	if e.Version == 0 {
		text = fmt.Sprintf("%s: %s %s was started by another", ErrConflict, e.Saga, e.ID)
	}
	if e.Err != nil {
		text += ": " + e.Err.Error()
	}
	return text
}

// Unwrap is ErrConflict and the server's error.
func (e *ConflictError) Unwrap() []error { return []error{ErrConflict, e.Err} }

// DuplicateSagaError is ErrDuplicateSaga within one registry.
type DuplicateSagaError struct{ Saga string }

func (e *DuplicateSagaError) Error() string {
	return fmt.Sprintf("%s: %s is defined already; a saga's name is its collection, so give this one another", ErrDuplicateSaga, e.Saga)
}

// Unwrap is ErrDuplicateSaga.
func (e *DuplicateSagaError) Unwrap() error { return ErrDuplicateSaga }

// OwnerError is ErrDuplicateSaga between programs: the collection holds sagas of another type.
type OwnerError struct {
	Want, Found TypeInfo // ours, and what the database says
}

func (e *OwnerError) Error() string {
	return fmt.Sprintf("%s: collection %s holds sagas of %s with %s ids, and this program's are of %s with %s ids; take another name, or if both are the same saga say so by WithOwner(%q)",
		ErrDuplicateSaga, e.Want.Name, e.Found.Owner, e.Found.ID, e.Want.Owner, e.Want.ID, e.Found.Owner)
}

// Unwrap is ErrDuplicateSaga.
func (e *OwnerError) Unwrap() error { return ErrDuplicateSaga }

// GapError is ErrGap with the numbers: Next is the one that is waited for.
type GapError struct {
	Saga, ID    string
	Next, Got   int64
	Held, Limit int
	Bytes       int    // of the messages that would be held, if those are above 8 MiB
	Stuck       string // why the step of number Next failed, if it is held too
}

func (e *GapError) Error() string {
	if e.Stuck != "" {
		return fmt.Sprintf("%s: %s %s holds %d messages because the step of number %d fails: %s; mend the step, or send another message of that number",
			ErrGap, e.Saga, e.ID, e.Held, e.Next, e.Stuck)
	}
	if e.Bytes > 0 {
		return fmt.Sprintf("%s: %s %s waits for number %d and holds %d; with number %d those would be %d bytes, above 8 MiB",
			ErrGap, e.Saga, e.ID, e.Next, e.Held, e.Got, e.Bytes)
	}
	return fmt.Sprintf("%s: %s %s waits for number %d and holds %d of at most %d when %d comes; raise WithHeldLimit, or let the policy of this error retry later",
		ErrGap, e.Saga, e.ID, e.Next, e.Held, e.Limit, e.Got)
}

// Unwrap is ErrGap.
func (e *GapError) Unwrap() error { return ErrGap }

// PayloadError is ErrPayload with the message.
type PayloadError struct {
	Type, Message string
	Err           error
}

func (e *PayloadError) Error() string {
	return fmt.Sprintf("%s: message %s of type %s: %s", ErrPayload, e.Message, e.Type, e.Err)
}

// Unwrap is ErrPayload and the decoder's error.
func (e *PayloadError) Unwrap() []error { return []error{ErrPayload, e.Err} }

// IDError is ErrID with the text.
type IDError struct {
	Text string
	Kind IDKind
}

func (e *IDError) Error() string { return fmt.Sprintf("%s: %q is no %s", ErrID, e.Text, e.Kind) }

// Unwrap is ErrID.
func (e *IDError) Unwrap() error { return ErrID }

// DefinitionError is ErrDefinition with everything that is wrong.
type DefinitionError struct {
	Saga     string
	Problems []string
}

func (e *DefinitionError) Error() string {
	return fmt.Sprintf("%s: %s: %s", ErrDefinition, e.Saga, strings.Join(e.Problems, "; "))
}

// Unwrap is ErrDefinition.
func (e *DefinitionError) Unwrap() error { return ErrDefinition }
