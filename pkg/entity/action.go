package entity

import (
	"context"
	"fmt"
)

// Action is something to be done to an entity, as a value: what decides can return it, and what has the transaction applies
// it. The zero value is nothing to be done.
type Action[T any] struct {
	verb verb
	t    T
}

type verb uint8

const (
	insert verb = iota + 1
	update
	store
	remove
)

// ToInsert is the Action of Insert.
func ToInsert[T any](t T) Action[T] { return Action[T]{insert, t} }

// ToUpdate is the Action of Update.
func ToUpdate[T any](t T) Action[T] { return Action[T]{update, t} }

// ToStore is the Action of Store.
func ToStore[T any](t T) Action[T] { return Action[T]{store, t} }

// ToDelete is the Action of Delete with the id of t, whatever its version.
func ToDelete[T any](t T) Action[T] { return Action[T]{remove, t} }

// Nothing is the zero Action.
func Nothing[T any]() Action[T] { return Action[T]{} }

// target is what actions can be applied to.
type target[T any, I ID] interface {
	Insert(ctx context.Context, t T) (int64, error)
	Update(ctx context.Context, t T) (int64, error)
	Store(ctx context.Context, t T) (int64, error)
	Delete(ctx context.Context, id I) (bool, error)
}

// Apply carries the actions out in their order, up to the first error.
func (c *Collection[T, I]) Apply(ctx context.Context, actions ...Action[T]) error {
	return apply(ctx, c, c.id, actions)
}

func apply[T any, I ID](ctx context.Context, to target[T, I], id func(*T) *I, actions []Action[T]) (err error) {
	for i, a := range actions {
		switch a.verb {
		case insert:
			_, err = to.Insert(ctx, a.t)
		case update:
			_, err = to.Update(ctx, a.t)
		case store:
			_, err = to.Store(ctx, a.t)
		case remove:
			_, err = to.Delete(ctx, *id(&a.t))
		}
		if err != nil {
			return fmt.Errorf("action %d of %d: %w", i+1, len(actions), err)
		}
	}
	return nil
}
