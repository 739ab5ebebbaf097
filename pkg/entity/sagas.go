package entity

import (
	"context"
	"sync/atomic"

	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/service/sagas"
	"github.com/outrelay/outrelay/pkg/outbox"
)

// sagaCheck rejects the collection of a saga, which may belong to another process. A write of an entity would replace a saga.
type sagaCheck struct {
	coll   *mongo.Collection
	passed atomic.Bool
}

// codeUnauthorized is the error code of MongoDB for a missing right.
const codeUnauthorized = 13

// run returns an error if the collection is that of a saga. It reads the types of the sagas until it has succeeded once, outside of
// the transaction of ctx.
func (c *sagaCheck) run(ctx context.Context) error {
	if c.passed.Load() {
		return nil
	}

	found, isSaga, err := sagas.NewMongo(c.coll.Database()).FindType(outbox.Outside(ctx), c.coll.Name())
	switch {
	// Without the right to read the types, the user has no sagas in this database.
	case mongodb.HasCode(err, codeUnauthorized):
	case err != nil:
		return err
	case isSaga:
		return sagas.RejectEntities(c.coll.Database().Name()+"."+c.coll.Name(), found.Owner)
	}
	c.passed.Store(true)
	return nil
}
