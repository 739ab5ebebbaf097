package store

import (
	"context"
	"errors"

	"go.mongodb.org/mongo-driver/v2/mongo"
)

// slowRuns is how often a transaction is attempted before it is made smaller: it has to end within what is left of a lease, and
// with a slow server one of many documents never would.
const slowRuns = 3

// errSlow ends the attempts at a transaction that should be smaller.
var errSlow = errors.New("the transaction does not end in time")

// inParts writes a list in fenced transactions of up to most of it, each majority committed before the next begins. One that is
// attempted in vain is made smaller. write may run several times, and has to be idempotent.
func inParts[T any](ctx context.Context, f Fencer, list []T, most int, write func(tx context.Context, c *mongo.Client, part []T) error) error {
	for len(list) > 0 {
		part, runs := list[:min(len(list), most)], 0
		err := f.Fenced(ctx, nil, func(tx context.Context) error {
			s := mongo.SessionFromContext(tx)
			if s == nil {
				return errOutside
			}
			if runs++; runs > slowRuns && len(part) > 1 {
				return errSlow
			}
			return write(tx, s.Client(), part)
		})
		if errors.Is(err, errSlow) {
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
