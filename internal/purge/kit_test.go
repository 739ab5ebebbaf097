package purge

import (
	"context"
	"testing"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/outboxes"
)

// owner runs transactions as a lease does, but for the fence.
type owner struct {
	client *mongo.Client
	dirty  []string
	n      int
	twice  bool // runs each function a second time after its commit, as after an unknown outcome
}

func (o *owner) Fenced(ctx context.Context, dirty []string, fn func(context.Context) error) error {
	o.n++
	o.dirty = append(o.dirty, dirty...)
	runs := 1
	if o.twice {
		runs = 2
	}

	for range runs {
		if err := o.client.UseSession(ctx, func(ctx context.Context) error {
			_, err := mongo.SessionFromContext(ctx).WithTransaction(ctx, func(ctx context.Context) (any, error) { return nil, fn(ctx) })
			return err
		}); err != nil {
			return err
		}
	}

	return nil
}

func exceptionOutbox(t *testing.T) (*mongo.Collection, *owner) {
	t.Helper()
	client := stacktest.Client(t)
	coll := mongodb.Majority(stacktest.Database(t, client).Collection("outbox"))
	if err := outboxes.EnsureIndexes(t.Context(), coll); err != nil {
		t.Fatal(err)
	}
	return coll, &owner{client: client, twice: true}
}

func marshal(t *testing.T, d bson.D) bson.Raw {
	t.Helper()
	raw, err := bson.Marshal(d)
	if err != nil {
		t.Fatal(err)
	}
	return raw
}

func findDocument(t *testing.T, coll *mongo.Collection, id any) bson.M {
	t.Helper()
	var m bson.M
	if err := coll.FindOne(t.Context(), bson.D{{Key: "_id", Value: id}}).Decode(&m); err != nil {
		t.Fatal(id, err)
	}
	return m
}

func newDatabase(t *testing.T) *mongo.Database {
	t.Helper()
	return stacktest.Database(t, stacktest.Client(t))
}
