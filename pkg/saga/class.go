package saga

import "github.com/outrelay/outrelay/pkg/consumer"

// By these methods a consumer recognizes the errors that every attempt would repeat. The message becomes a dead letter at
// once.

// Is reports true for consumer.ErrMalformed: another attempt has the same result.
func (e *CorrelationError) Is(target error) bool { return target == consumer.ErrMalformed }

// Is reports true for consumer.ErrMalformed: another attempt has the same result.
func (e *PayloadError) Is(target error) bool { return target == consumer.ErrMalformed }

// Is reports true for consumer.ErrMalformed: another attempt has the same result.
func (e *IDError) Is(target error) bool { return target == consumer.ErrMalformed }
