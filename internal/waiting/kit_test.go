package waiting

import (
	"context"

	"go.mongodb.org/mongo-driver/v2/mongo"
)

// plainFencer runs its function in a transaction, twice if the test sets that, as after a commit of unknown
// outcome.
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
