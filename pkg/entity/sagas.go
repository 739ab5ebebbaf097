package entity

import (
	"context"
	"sync/atomic"
	"time"

	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/service/sagas"
	"github.com/outrelay/outrelay/pkg/outbox"
)

// sagaCheck rejects the collection of a saga, which may belong to another process. A write of an entity would replace a saga.
type sagaCheck struct {
	coll   *mongo.Collection
	passed atomic.Pointer[time.Time] // when it last found no saga; nil before
}

// sagaCheckInterval is how long a collection without a saga counts as such. Another process may define a saga later.
const sagaCheckInterval = time.Minute

// codeUnauthorized is the error code of MongoDB for a missing right.
const codeUnauthorized = 13

// run returns an error if the collection is that of a saga. It reads the types of the sagas, outside of the transaction of ctx, if that
// was longer than sagaCheckInterval ago.
func (c *sagaCheck) run(ctx context.Context) error {
	now := time.Now()
	if passed := c.passed.Load(); passed != nil && now.Sub(*passed) < sagaCheckInterval {
		return nil
	}

	found, isSaga, err := sagas.NewMongo(c.coll.Database()).FindType(outbox.Outside(ctx), c.coll.Name())
	switch {
	// The right to read the types is not required of a user that has no sagas.
	case mongodb.HasCode(err, codeUnauthorized):
	case err != nil:
		return err
	case isSaga:
		return sagas.RejectEntities(c.coll.Database().Name()+"."+c.coll.Name(), found.Owner)
	}
	c.passed.Store(&now)
	return nil
}
