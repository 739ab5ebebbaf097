package saga

import "github.com/outrelay/outrelay/pkg/consumer"

// Each typed error matches one of the four kinds of errors of the consumer. Policies use them to
// decide about retries.

// Is reports true for consumer.ErrValidation: another attempt has the same result.
func (e *CorrelationError) Is(target error) bool { return target == consumer.ErrValidation }

// Is reports true for consumer.ErrValidation: another attempt has the same result.
func (e *PayloadError) Is(target error) bool { return target == consumer.ErrValidation }

// Is reports true for consumer.ErrValidation: another attempt has the same result.
func (e *IDError) Is(target error) bool { return target == consumer.ErrValidation }

// Is reports true for consumer.ErrOperational: the saga may be started later.
func (e *NotFoundError) Is(target error) bool { return target == consumer.ErrOperational }

// Is reports true for consumer.ErrOperational: another attempt works on the new state.
func (e *ConflictError) Is(target error) bool { return target == consumer.ErrOperational }

// Is reports true for consumer.ErrOperational: the missing message may arrive later.
func (e *GapError) Is(target error) bool { return target == consumer.ErrOperational }

// Is reports true for consumer.ErrConfiguration: the program must be changed.
func (e *DefinitionError) Is(target error) bool { return target == consumer.ErrConfiguration }

// Is reports true for consumer.ErrConfiguration: the program must be changed.
func (e *DuplicateSagaError) Is(target error) bool { return target == consumer.ErrConfiguration }

// Is reports true for consumer.ErrConfiguration: the program must be changed.
func (e *OwnerError) Is(target error) bool { return target == consumer.ErrConfiguration }
