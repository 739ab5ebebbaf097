package stacktest

import (
	"context"
	"sync/atomic"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
)

// Hasty simulates the fence of a lease that is too short for a slow server. If a transaction makes more than Most
// documents match Done, it does not end in time. It is repeated until the context ends.
type Hasty struct {
	Fence interface {
		Fenced(ctx context.Context, also bson.D, fn func(ctx context.Context) error) error
	}
	Coll *mongo.Collection
	Done bson.D
	Most int64
	Late atomic.Int64 // failed attempts
}

// Fenced calls Fence.Fenced until a transaction is not too large.
func (h *Hasty) Fenced(ctx context.Context, also bson.D, fn func(ctx context.Context) error) error {
	for {
		late := false
		err := h.Fence.Fenced(ctx, also, func(tx context.Context) error {
			coll := mongo.SessionFromContext(tx).Client().Database(h.Coll.Database().Name()).Collection(h.Coll.Name())

			before, err := coll.CountDocuments(tx, append(bson.D{}, h.Done...))
			if err == nil {
				err = fn(tx)
			}
			if err != nil {
				return err
			}

			n, err := coll.CountDocuments(tx, append(bson.D{}, h.Done...))
			if late = err == nil && max(n-before, before-n) > h.Most; late {
				// The error aborts the transaction as an expired lease does.
				return context.Canceled
			}
			return err
		})

		if !late || ctx.Err() != nil {
			return err
		}
		h.Late.Add(1)
	}
}
