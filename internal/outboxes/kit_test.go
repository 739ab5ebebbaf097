package outboxes

import (
	"context"
	"testing"

	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/devstack/stacktest"
)

// plainFencer runs its function in a transaction, twice if it is told so, as after a commit of unknown outcome.
type plainFencer struct {
	client *mongo.Client
	twice  bool
	dirty  []string
}

func (f *plainFencer) Fenced(ctx context.Context, dirty []string, fn func(ctx context.Context) error) error {
	f.dirty = dirty
	for range map[bool]int{false: 1, true: 2}[f.twice] {
		err := f.client.UseSession(ctx, func(ctx context.Context) error {
			_, err := mongo.SessionFromContext(ctx).WithTransaction(ctx, func(ctx context.Context) (any, error) { return nil, fn(ctx) })
			return err
		})
		if err != nil {
			return err
		}
	}
	return nil
}

func database(t *testing.T) *mongo.Database {
	t.Helper()
	return stacktest.Database(t, stacktest.Client(t))
}
