package entity

import (
	"context"
	"errors"

	"github.com/outrelay/outrelay/pkg/consumer"
)

// Finder loads entities. *Collection and *Recorded implement it.
type Finder[T any, I ID] interface {
	Find(ctx context.Context, id I) (T, bool, error)
	Load(ctx context.Context, id I) (T, error)
}

// Required returns a message handler that loads an entity and passes it to fn. id returns the id of
// the entity for a message. The entity is loaded in the transaction of the message.
//
// If the entity does not exist, fn is not called. The error then is one of consumer.Discard, so that
// the message passes and is counted, and it wraps ErrMissing, so that a middleware can recognize it.
// If fn itself returns ErrMissing, the message is not dropped,
// because fn may have written something before: the policy decides. An error of id is returned.
func Required[T any, I ID](
	from Finder[T, I],
	id func(*consumer.Message) (I, error),
	fn func(ctx context.Context, m *consumer.Message, t T) error,
) consumer.HandlerFunc {
	return func(ctx context.Context, m *consumer.Message) error {
		key, err := id(m)
		if err != nil {
			return err
		}

		t, err := from.Load(ctx, key)
		switch {
		case errors.Is(err, ErrMissing):
			return consumer.Discard(err)
		case err != nil:
			return err
		}

		return fn(ctx, m, t)
	}
}

// Optional is Required for an entity that may be missing. If it does not exist, fn is called with
// nil.
func Optional[T any, I ID](
	from Finder[T, I],
	id func(*consumer.Message) (I, error),
	fn func(ctx context.Context, m *consumer.Message, t *T) error,
) consumer.HandlerFunc {
	return func(ctx context.Context, m *consumer.Message) error {
		key, err := id(m)
		if err != nil {
			return err
		}

		t, ok, err := from.Find(ctx, key)
		switch {
		case err != nil:
			return err
		case !ok:
			return fn(ctx, m, nil)
		}

		return fn(ctx, m, &t)
	}
}
