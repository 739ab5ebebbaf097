package entity

import (
	"context"
	"fmt"
)

// Action is a change of an entity as a value. Code that decides about a change can return an
// Action, and code that has the transaction applies it. The zero value does nothing.
type Action[T any] struct {
	verb verb
	t    T
}

// verb is the kind of an Action.
type verb uint8

const (
	verbInsert verb = iota + 1
	verbUpdate
	verbStore
	verbDelete
)

// ToInsert returns an Action that calls Insert with t.
func ToInsert[T any](t T) Action[T] { return Action[T]{verbInsert, t} }

// ToUpdate returns an Action that calls Update with t.
func ToUpdate[T any](t T) Action[T] { return Action[T]{verbUpdate, t} }

// ToStore returns an Action that calls Store with t.
func ToStore[T any](t T) Action[T] { return Action[T]{verbStore, t} }

// ToDelete returns an Action that calls Delete with the id of t. It ignores the version.
func ToDelete[T any](t T) Action[T] { return Action[T]{verbDelete, t} }

// Nothing returns an Action that does nothing.
func Nothing[T any]() Action[T] { return Action[T]{} }

// actionTarget is implemented by the collections to which actions can be applied.
type actionTarget[T any, I ID] interface {
	Insert(ctx context.Context, t T) (int64, error)
	Update(ctx context.Context, t T) (int64, error)
	Store(ctx context.Context, t T) (int64, error)
	Delete(ctx context.Context, id I) (bool, error)
}

// Apply applies the actions in their order. It stops at the first error, which contains the
// position of the action.
func (c *Collection[T, I]) Apply(ctx context.Context, actions ...Action[T]) error {
	return applyActions(ctx, c, c.id, actions)
}

// applyActions applies the actions to a collection.
func applyActions[T any, I ID](
	ctx context.Context, to actionTarget[T, I], id func(*T) *I, actions []Action[T],
) (err error) {
	for i, a := range actions {
		switch a.verb {
		case verbInsert:
			_, err = to.Insert(ctx, a.t)
		case verbUpdate:
			_, err = to.Update(ctx, a.t)
		case verbStore:
			_, err = to.Store(ctx, a.t)
		case verbDelete:
			_, err = to.Delete(ctx, *id(&a.t))

		}
		if err != nil {
			return fmt.Errorf("action %d of %d: %w", i+1, len(actions), err)
		}
	}

	return nil
}
