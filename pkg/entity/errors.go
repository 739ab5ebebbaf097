package entity

import (
	"errors"
	"fmt"

	"github.com/outrelay/outrelay/pkg/consumer"
)

// Errors returned by this package. Test for them with errors.Is.
var (
	// ErrMissing means that a required entity does not exist. The error is a *NotFoundError.
	ErrMissing = errors.New("entity not found")

	// ErrExists means that an entity to be inserted exists. The error is an *ExistsError. With
	// MongoDB, the failed insert has aborted the transaction.
	ErrExists = errors.New("entity exists already")

	// ErrStale means that the stored entity has another version than the given one. The error is a
	// *VersionError.
	ErrStale = errors.New("entity was changed since it was loaded")

	// ErrRefused means that a call cannot be recorded correctly. Nothing of it was done. The error
	// is a *RefusedError.
	ErrRefused = errors.New("cannot be recorded")

	// ErrUnknownChange means that a Projector does not understand a message. The error is an
	// *UnknownChangeError.
	ErrUnknownChange = errors.New("unknown kind of change")
)

// NotFoundError reports an entity that does not exist. It wraps ErrMissing.
type NotFoundError struct{ Collection, ID string }

func (e *NotFoundError) Error() string {
	return fmt.Sprintf("%s %s: %s", e.Collection, e.ID, ErrMissing)
}

// Unwrap returns ErrMissing.
func (e *NotFoundError) Unwrap() error { return ErrMissing }

// ExistsError reports an entity that exists although it was to be inserted. It wraps ErrExists.
type ExistsError struct {
	// Collection and ID identify the entity. ID is empty if several entities were inserted and the
	// server does not report which one exists.
	Collection, ID string

	// Err is the error of the server, or nil if the existing entity was found before the insert.
	Err error
}

func (e *ExistsError) Error() string {
	if e.ID == "" {
		return fmt.Sprintf("%s: %s", e.Collection, ErrExists)
	}
	return fmt.Sprintf("%s %s: %s", e.Collection, e.ID, ErrExists)
}

// Unwrap returns ErrExists and the error of the server.
func (e *ExistsError) Unwrap() []error {
	if e.Err == nil {
		return []error{ErrExists}
	}
	return []error{ErrExists, e.Err}
}

// VersionError reports an entity that was changed since it was loaded. It wraps ErrStale.
type VersionError struct {
	// Collection and ID identify the entity.
	Collection, ID string

	// Given is the version of the entity to be written or deleted, and Stored the version in the
	// collection.
	Given, Stored int64
}

func (e *VersionError) Error() string {
	return fmt.Sprintf("%s %s: %s: version %d is stored, version %d was given; load it again",
		e.Collection, e.ID, ErrStale, e.Stored, e.Given)
}

// Unwrap returns ErrStale.
func (e *VersionError) Unwrap() error { return ErrStale }

// RefusedError reports a call that cannot be recorded correctly. It wraps ErrRefused.
type RefusedError struct{ Collection, Reason string }

func (e *RefusedError) Error() string {
	return fmt.Sprintf("%s: %s: %s", e.Collection, ErrRefused, e.Reason)
}

// Unwrap returns ErrRefused.
func (e *RefusedError) Unwrap() error { return ErrRefused }

// UnknownChangeError reports a message that a Projector does not understand. It wraps
// ErrUnknownChange. Another attempt fails in the same way, so a policy should move the message to
// the dead letters at once. Requeue it when the projector supports it.
type UnknownChangeError struct {
	// Message is the place of the message: "<topic>/<partition>/<offset>".
	Message string

	// ID is the id of the message.
	ID string

	// Reason is the problem.
	Reason string

	// Err is the error of the decoder, or nil if the payload is not the problem.
	Err error
}

func (e *UnknownChangeError) Error() string {
	s := fmt.Sprintf("message %s at %s: %s: %s", e.ID, e.Message, ErrUnknownChange, e.Reason)
	if e.Err != nil {
		s += ": " + e.Err.Error()
	}

	return s
}

// Is reports true for consumer.ErrMalformed: another attempt has the same result.
func (e *UnknownChangeError) Is(target error) bool { return target == consumer.ErrMalformed }

// Unwrap returns ErrUnknownChange and the cause.
func (e *UnknownChangeError) Unwrap() []error {
	if e.Err == nil {
		return []error{ErrUnknownChange}
	}
	return []error{ErrUnknownChange, e.Err}
}
