package store

import (
	"context"
	"errors"

	"go.mongodb.org/mongo-driver/v2/mongo"
)

// slowRuns is how often a transaction is attempted before it is made smaller: it has to end within what is left of a lease, and
// with a slow server one of many documents never would.
const slowRuns = 3

// ErrSlow ends the attempts at a transaction that should be smaller.
var ErrSlow = errors.New("the transaction does not end in time")

// FencedSoon is f.Fenced of a transaction of n documents; where there are several, and a few attempts were in vain, it is [ErrSlow].
func FencedSoon(ctx context.Context, f Fencer, dirty []string, n int, fn func(ctx context.Context) error) error {
	runs := 0
	return f.Fenced(ctx, dirty, func(tx context.Context) error {
		if runs++; runs > slowRuns && n > 1 {
			return ErrSlow
		}
		return fn(tx)
	})
}

// inParts writes a list in fenced transactions of up to most of it, each majority committed before the next begins. One that is
// attempted in vain is made smaller. write may run several times, and has to be idempotent.
func inParts[T any](ctx context.Context, f Fencer, list []T, most int, write func(tx context.Context, c *mongo.Client, part []T) error) error {
	for len(list) > 0 {
		part := list[:min(len(list), most)]
		err := FencedSoon(ctx, f, nil, len(part), func(tx context.Context) error {
			s := mongo.SessionFromContext(tx)
			if s == nil {
				return errOutside
			}
			return write(tx, s.Client(), part)
		})
		if errors.Is(err, ErrSlow) {
			most = max(len(part)/4, 1)
			continue
		}
		if err != nil {
			return err
		}
		list = list[len(part):]
	}
	return nil
}
