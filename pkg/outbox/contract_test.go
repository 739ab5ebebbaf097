package outbox_test

import (
	"context"
	"testing"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/lab/boxtest"
	"github.com/outrelay/outrelay/pkg/event"
	"github.com/outrelay/outrelay/pkg/outbox"
)

func TestContract(t *testing.T) {
	t.Parallel()
	boxtest.Run(t, func(t *testing.T) boxtest.Fixture {
		b := setup(t)
		return boxtest.Fixture{
			Box:         b.box,
			Plain:       b.newBox(t, outbox.WithoutTransaction()),
			Small:       b.newBox(t, outbox.WithMaxSize(boxtest.SmallSize)),
			With:        func(m ...outbox.Middleware) boxtest.Box { return b.newBox(t, outbox.WithMiddleware(m...)) },
			Transaction: func(ctx context.Context, fn func(context.Context) error) error { return b.box.Transaction(ctx, fn) },
			Stored: func(t *testing.T) [][]byte {
				cur, err := b.coll.Find(t.Context(), bson.D{}, options.Find().SetSort(bson.D{{Key: "ts", Value: 1}}))
				if err != nil {
					t.Fatal(err)
				}

				var raws []bson.Raw
				if err := cur.All(t.Context(), &raws); err != nil {
					t.Fatal(err)
				}

				docs := make([][]byte, len(raws))
				for i, raw := range raws {
					docs[i] = raw
				}

				return docs
			},
			Claim: func(t *testing.T, id event.ID) {
				if _, err := b.coll.DeleteOne(t.Context(), bson.D{{Key: "_id", Value: id}}); err != nil {
					t.Fatal(err)
				}
			},
		}
	})
}
