package saga

import "github.com/outrelay/outrelay/pkg/consumer"

// Each typed error is also one of the consumer's four kinds, by which policies tell what another attempt is good for.

// Is reports consumer.ErrValidation.
func (e *CorrelationError) Is(target error) bool { return target == consumer.ErrValidation }

// Is reports consumer.ErrValidation.
func (e *PayloadError) Is(target error) bool { return target == consumer.ErrValidation }

// Is reports consumer.ErrValidation.
func (e *IDError) Is(target error) bool { return target == consumer.ErrValidation }

// Is reports consumer.ErrOperational: the saga may be started later.
func (e *NotFoundError) Is(target error) bool { return target == consumer.ErrOperational }

// Is reports consumer.ErrOperational.
func (e *ConflictError) Is(target error) bool { return target == consumer.ErrOperational }

// Is reports consumer.ErrOperational: the message that is waited for may come.
func (e *GapError) Is(target error) bool { return target == consumer.ErrOperational }

// Is reports consumer.ErrConfiguration.
func (e *DefinitionError) Is(target error) bool { return target == consumer.ErrConfiguration }

// Is reports consumer.ErrConfiguration.
func (e *DuplicateSagaError) Is(target error) bool { return target == consumer.ErrConfiguration }

// Is reports consumer.ErrConfiguration.
func (e *OwnerError) Is(target error) bool { return target == consumer.ErrConfiguration }
