package saga

import (
	"errors"

	"github.com/outrelay/outrelay/internal/service/sagas"
)

// Errors returned by this package. Test for them with errors.Is.
var (
	// ErrNoID means that a message or a Ref does not contain the id of a saga, or contains a text that is not an id of the
	// saga's kind. A message with this error is also consumer.ErrMalformed, so it becomes a dead letter at once.
	ErrNoID = sagas.ErrNoID

	// ErrNotFound means that the saga of a message or a Ref does not exist. The consumer's Retry handles the message again,
	// because the start of the saga may be on its way. Missing prevents the error.
	ErrNotFound = errors.New("saga not found")

	// ErrConflict means that another step of the saga was committed first. The consumer's Retry handles the message again.
	ErrConflict = sagas.ErrConflict

	// ErrGap means that too many messages are held because an earlier one is missing.
	ErrGap = errors.New("too many messages wait for an earlier one")

	// ErrDefinition means that the definition of a saga has mistakes, or that its name belongs to another saga. The text
	// lists all mistakes.
	ErrDefinition = errors.New("invalid saga definition")
)
