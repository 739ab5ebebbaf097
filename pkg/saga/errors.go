package saga

import (
	"errors"
	"fmt"
	"strings"
)

// Errors returned by this package. Test for them with errors.Is.
var (
	// ErrNoSagaID means that neither the correlation function nor the header saga-id contains the
	// id of the saga. The error is a *CorrelationError. A correlation function may return
	// ErrNoSagaID, so that the header decides.
	ErrNoSagaID = errors.New("no saga id")

	// ErrDrop is for steps: see Func.
	ErrDrop = errors.New("the step drops the message")

	// ErrNotFound means that the saga of a message does not exist. The error is a *NotFoundError.
	ErrNotFound = errors.New("saga not found")

	// ErrConflict means that another step of the saga was committed first. The error is a
	// *ConflictError. Handle the message again in a new transaction.
	ErrConflict = errors.New("saga was changed by another step")

	// ErrDuplicateSaga means that a saga with this name exists. The error is a *DuplicateSagaError
	// or an *OwnerError.
	ErrDuplicateSaga = errors.New("saga name is in use")

	// ErrGap means that too many messages are held because an earlier one is missing. The error is
	// a *GapError.
	ErrGap = errors.New("too many messages wait for an earlier one")

	// ErrPayload means that the value of a message cannot be decoded. The error is a *PayloadError.
	ErrPayload = errors.New("payload cannot be decoded")

	// ErrID means that a text is not an id of the kind that the saga uses. The error is an
	// *IDError.
	ErrID = errors.New("not an id of this saga")

	// ErrNoOutbox means that a step emits an event, but the registry has no outbox. Set one with
	// WithOutbox.
	ErrNoOutbox = errors.New("the saga registry has no outbox")

	// ErrNoStep means that the context of a call of Emit does not belong to a running step.
	ErrNoStep = errors.New("no running saga step in this context")

	// ErrDefinition means that the definition of a saga has mistakes. The error is a
	// *DefinitionError.
	ErrDefinition = errors.New("invalid saga definition")

	// ErrUnknownMessage means that a saga received a message of a type that it does not handle.
	ErrUnknownMessage = errors.New("saga does not handle this type of message")
)

// CorrelationError reports a message without the id of its saga. It wraps ErrNoSagaID.
type CorrelationError struct {
	// Saga is the name of the saga. Type and Message are the type and the id of the message.
	Saga, Type, Message string

	// Err is the error of the correlation function or of the header. It is nil if there is no id at
	// all.
	Err error
}

func (e *CorrelationError) Error() string {
	cause := "the correlation function found none, and there is no header " + HeaderID
	if e.Err != nil {
		cause = e.Err.Error()
	}
	return fmt.Sprintf("%s: message %s of type %s for saga %s: %s", ErrNoSagaID, e.Message, e.Type, e.Saga, cause)
}

// Unwrap returns ErrNoSagaID and the cause.
func (e *CorrelationError) Unwrap() []error { return []error{ErrNoSagaID, e.Err} }

// NotFoundError reports a message whose saga does not exist. It wraps ErrNotFound. Saga and ID
// identify the saga. Type and Message are the type and the id of the message.
type NotFoundError struct{ Saga, ID, Type, Message string }

func (e *NotFoundError) Error() string {
	return fmt.Sprintf("%s: %s %s for message %s of type %s, which does not start a saga; "+
		"if this can happen, define a NotFound callback for the type",
		ErrNotFound, e.Saga, e.ID, e.Message, e.Type)
}

// Unwrap returns ErrNotFound.
func (e *NotFoundError) Unwrap() error { return ErrNotFound }

// ConflictError reports a change that was rejected, because another step has changed the saga. It
// wraps ErrConflict.
type ConflictError struct {
	// Saga and ID identify the saga.
	Saga, ID string

	// Version is the version on which the rejected change was based. 0 is a start.
	Version int64

	// Err is the error of the server with its labels, or nil if the server did not report the
	// conflict.
	Err error
}

func (e *ConflictError) Error() string {
	text := fmt.Sprintf("%s: %s %s at version %d", ErrConflict, e.Saga, e.ID, e.Version)
	if e.Version == 0 {
		text = fmt.Sprintf("%s: %s %s was started before", ErrConflict, e.Saga, e.ID)
	}
	if e.Err != nil {
		text += ": " + e.Err.Error()
	}
	return text
}

// Unwrap returns ErrConflict and the error of the server.
func (e *ConflictError) Unwrap() []error { return []error{ErrConflict, e.Err} }

// DuplicateSagaError reports two sagas with the same name in one registry. It wraps
// ErrDuplicateSaga.
type DuplicateSagaError struct{ Saga string }

func (e *DuplicateSagaError) Error() string {
	return fmt.Sprintf("%s: %s is defined already; the name is also the collection, so choose another one",
		ErrDuplicateSaga, e.Saga)
}

// Unwrap returns ErrDuplicateSaga.
func (e *DuplicateSagaError) Unwrap() error { return ErrDuplicateSaga }

// OwnerError reports two sagas with the same name in two programs: the collection contains sagas of
// another type. It wraps ErrDuplicateSaga.
type OwnerError struct {
	// Want describes the saga of this program, and Found the one in the database.
	Want, Found TypeInfo
}

func (e *OwnerError) Error() string {
	return fmt.Sprintf("%s: collection %s contains sagas of %s with %s ids, but this program defines it for %s with %s ids; "+
		"choose another name, or if both are the same saga, set WithOwner(%q)",
		ErrDuplicateSaga, e.Want.Name, e.Found.Owner, e.Found.ID, e.Want.Owner, e.Want.ID, e.Found.Owner)
}

// Unwrap returns ErrDuplicateSaga.
func (e *OwnerError) Unwrap() error { return ErrDuplicateSaga }

// GapError reports that a message cannot be held, because too many are held already. It wraps
// ErrGap.
type GapError struct {
	// Saga and ID identify the saga.
	Saga, ID string

	// Next is the number of the missing message, and Got the number of the message that was
	// rejected.
	Next, Got int64

	// Held is the number of held messages, and Limit the largest allowed number.
	Held, Limit int

	// Bytes is the size that the held messages would have, if it exceeds 8 MiB. Otherwise it is 0.
	Bytes int

	// Stuck is the error of the step for message Next, if that message is held and its step failed.
	Stuck string
}

func (e *GapError) Error() string {
	if e.Stuck != "" {
		return fmt.Sprintf("%s: %s %s holds %d messages because the step for number %d fails: %s; "+
			"fix the step, or send another message with this number",
			ErrGap, e.Saga, e.ID, e.Held, e.Next, e.Stuck)
	}

	if e.Bytes > 0 {
		return fmt.Sprintf("%s: %s %s waits for number %d and holds %d; with number %d those would be %d bytes, above 8 MiB",
			ErrGap, e.Saga, e.ID, e.Next, e.Held, e.Got, e.Bytes)
	}

	return fmt.Sprintf("%s: %s %s waits for number %d and holds %d of at most %d when %d arrives; "+
		"raise WithHeldLimit, or set a policy that retries this error later",
		ErrGap, e.Saga, e.ID, e.Next, e.Held, e.Limit, e.Got)
}

// Unwrap returns ErrGap.
func (e *GapError) Unwrap() error { return ErrGap }

// PayloadError reports a message whose value cannot be decoded. It wraps ErrPayload.
type PayloadError struct {
	// Type and Message are the type and the id of the message.
	Type, Message string

	// Err is the error of the decoder.
	Err error
}

func (e *PayloadError) Error() string {
	return fmt.Sprintf("%s: message %s of type %s: %s", ErrPayload, e.Message, e.Type, e.Err)
}

// Unwrap returns ErrPayload and the error of the decoder.
func (e *PayloadError) Unwrap() []error { return []error{ErrPayload, e.Err} }

// IDError reports a text that is not an id of the expected kind. It wraps ErrID.
type IDError struct {
	// Text is the text that was parsed.
	Text string

	// Kind is the expected kind.
	Kind IDKind
}

func (e *IDError) Error() string {
	return fmt.Sprintf("%s: %q is not a valid %s", ErrID, e.Text, e.Kind)
}

// Unwrap returns ErrID.
func (e *IDError) Unwrap() error { return ErrID }

// DefinitionError lists all mistakes in the definition of a saga. It wraps ErrDefinition.
type DefinitionError struct {
	// Saga is the name of the saga.
	Saga string

	// Problems contains one text for each mistake.
	Problems []string
}

func (e *DefinitionError) Error() string {
	return fmt.Sprintf("%s: %s: %s", ErrDefinition, e.Saga, strings.Join(e.Problems, "; "))
}

// Unwrap returns ErrDefinition.
func (e *DefinitionError) Unwrap() error { return ErrDefinition }
