package entity_test

import (
	"context"
	"testing"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/lab/entitytest"
	"github.com/outrelay/outrelay/internal/lab/memory"
	"github.com/outrelay/outrelay/internal/service/entities"
	"github.com/outrelay/outrelay/pkg/entity"
	"github.com/outrelay/outrelay/pkg/outbox/guard"
)

func TestMongoKeepsTheContract(t *testing.T) {
	t.Parallel()
	entitytest.Run(t, func(t *testing.T) entitytest.Fixture {
		w := setup(t)
		on := func(name string, opts ...guard.Option) entities.Documents {
			return entity.OnMongo(w.db.Collection(name), opts...)
		}
		view := entity.OnMongoView(w.db.Collection("view"), "version")
		return entitytest.Fixture{
			Docs: on("things"), Gone: on("things_deleted"), Plain: on("things", guard.WithoutTransaction()), View: view,
			Viewed: func(ctx context.Context) (docs []bson.Raw, err error) {
				cur, err := w.db.Collection("view").Find(ctx, bson.D{})
				if err != nil {
					return nil, err
				}

				return docs, cur.All(ctx, &docs)
			},
		}
	})
}

func TestMemoryKeepsTheContract(t *testing.T) {
	t.Parallel()
	entitytest.Run(t, func(*testing.T) entitytest.Fixture {
		db := memory.NewDB()
		view := memory.NewView(db, "view")
		return entitytest.Fixture{
			Docs: memory.NewDocuments(db, "things"), Gone: memory.NewDocuments(db, "things_deleted"),
			Plain: memory.NewPlainDocuments(db, "things"), View: view, Viewed: view.All,
		}
	})
}
