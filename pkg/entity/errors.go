package entity

import "errors"

// Errors returned by this package. Test for them with errors.Is.
var (
	// ErrNoID means that the id of an entity is the zero value.
	ErrNoID = errors.New("entity without an id")

	// ErrMissing means that a required entity does not exist.
	ErrMissing = errors.New("entity not found")

	// ErrExists means that an entity to be inserted exists. With MongoDB, the failed insert has aborted the transaction, and
	// the error wraps the one of the server.
	ErrExists = errors.New("entity exists already")

	// ErrStale means that the stored entity has another version than the given one. Load it again.
	ErrStale = errors.New("entity was changed since it was loaded")

	// ErrRejected means that a call cannot be recorded correctly. Nothing of it was done.
	ErrRejected = errors.New("cannot be recorded")

	// ErrUnknownChange means that a Projector does not understand a message. Another attempt fails in the same way, so the
	// error is also consumer.ErrMalformed: the message becomes a dead letter at once. Requeue it when the projector supports
	// it.
	ErrUnknownChange = errors.New("unknown kind of change")
)
