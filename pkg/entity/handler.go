package entity

import (
	"context"
	"errors"
	"fmt"

	"github.com/outrelay/outrelay/pkg/consumer"
)

// Finder is what entities are loaded from: a *Collection or a *Recorded.
type Finder[T any, I ID] interface {
	Find(ctx context.Context, id I) (T, bool, error)
	Load(ctx context.Context, id I) (T, error)
}

// Required makes of a function of a message and its entity a handler of the message: the entity that id names is loaded
// first, in the message's transaction, and if it is missing the function is not called and the message is done with. The
// error then is both consumer.ErrDrop, so that the consumer counts it as dropped and passes, and ErrMissing, so that a
// middleware can tell. An error of id is the handler's.
//
// A function that itself returns ErrMissing does not drop the message: it may have written something before, and its policy
// decides.
func Required[T any, I ID](from Finder[T, I], id func(*consumer.Message) (I, error), fn func(ctx context.Context, m *consumer.Message, t T) error) consumer.HandlerFunc {
	return func(ctx context.Context, m *consumer.Message) error {
		key, err := id(m)
		if err != nil {
			return err
		}
		t, err := from.Load(ctx, key)
		switch {
		case errors.Is(err, ErrMissing):
			return fmt.Errorf("%w: %w", consumer.ErrDrop, err)
		case err != nil:
			return err
		}
		return fn(ctx, m, t)
	}
}

// Optional is Required for an entity that may be missing: then the function gets nil.
func Optional[T any, I ID](from Finder[T, I], id func(*consumer.Message) (I, error), fn func(ctx context.Context, m *consumer.Message, t *T) error) consumer.HandlerFunc {
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
