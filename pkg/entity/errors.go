package entity

import (
	"errors"
	"fmt"

	"github.com/outrelay/outrelay/pkg/consumer"
)

// What calls answer, to be asked for with errors.Is; the errors are of the types below.
var (
	// ErrMissing says that a required entity is not there: a *NotFoundError.
	ErrMissing = errors.New("entity not found")
	// ErrExists says that an entity to be inserted is there already: an *ExistsError. On MongoDB the insert has aborted
	// the transaction.
	ErrExists = errors.New("entity exists already")
	// ErrStale says that somebody else has changed the entity since the version at hand: a *VersionError.
	ErrStale = errors.New("entity was changed meanwhile")
	// ErrRefused says that a call could not be recorded faithfully, so nothing of it was done: a *RefusedError.
	ErrRefused = errors.New("cannot be recorded")
	// ErrUnknownChange says that a Projector does not know what a message wants of it: an *UnknownChangeError.
	ErrUnknownChange = errors.New("not a change that the projector knows")
)

// NotFoundError is ErrMissing with what was looked for.
type NotFoundError struct{ Collection, ID string }

func (e *NotFoundError) Error() string {
	return fmt.Sprintf("%s %s: %s", e.Collection, e.ID, ErrMissing)
}

// Unwrap is ErrMissing.
func (e *NotFoundError) Unwrap() error { return ErrMissing }

// ExistsError is ErrExists. ID is "" where one of several was refused and the server does not say which; Err is the
// server's error, if it was the one that refused.
type ExistsError struct {
	Collection, ID string
	Err            error
}

func (e *ExistsError) Error() string {
	if e.ID == "" {
		return fmt.Sprintf("%s: %s", e.Collection, ErrExists)
	}
	return fmt.Sprintf("%s %s: %s", e.Collection, e.ID, ErrExists)
}

// Unwrap is ErrExists and the server's error.
func (e *ExistsError) Unwrap() []error {
	if e.Err == nil {
		return []error{ErrExists}
	}
	return []error{ErrExists, e.Err}
}

// VersionError is ErrStale: Given is the version of the entity that was to be written or deleted, Stored the one that is
// there.
type VersionError struct {
	Collection, ID string
	Given, Stored  int64
}

func (e *VersionError) Error() string {
	return fmt.Sprintf("%s %s: %s: version %d is stored, %d was given; load it again", e.Collection, e.ID, ErrStale, e.Stored, e.Given)
}

// Unwrap is ErrStale.
func (e *VersionError) Unwrap() error { return ErrStale }

// RefusedError is ErrRefused with the reason.
type RefusedError struct{ Collection, Reason string }

func (e *RefusedError) Error() string {
	return fmt.Sprintf("%s: %s: %s", e.Collection, ErrRefused, e.Reason)
}

// Unwrap is ErrRefused.
func (e *RefusedError) Unwrap() error { return ErrRefused }

// UnknownChangeError is ErrUnknownChange: the message, by place and id, and what is strange about it. Handling it again
// brings the same error, so a policy should send it to the dead letters at once, from where it is requeued when the
// projector has learned of it.
type UnknownChangeError struct {
	Message string // "<topic>/<partition>/<offset>"
	ID      string
	Reason  string
	Err     error // why the payload cannot be read, if that is it
}

func (e *UnknownChangeError) Error() string {
	s := fmt.Sprintf("message %s at %s: %s: %s", e.ID, e.Message, ErrUnknownChange, e.Reason)
	if e.Err != nil {
		s += ": " + e.Err.Error()
	}
	return s
}

// Is reports consumer.ErrValidation.
func (e *UnknownChangeError) Is(target error) bool { return target == consumer.ErrValidation }

// Unwrap is ErrUnknownChange and the cause.
func (e *UnknownChangeError) Unwrap() []error {
	if e.Err == nil {
		return []error{ErrUnknownChange}
	}
	return []error{ErrUnknownChange, e.Err}
}
