package memory

import (
	"errors"
	"strings"
	"testing"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/lab/entitytest"
	"github.com/outrelay/outrelay/internal/service/entities"
	"github.com/outrelay/outrelay/internal/service/sagas"
)

func TestEntityContract(t *testing.T) {
	t.Parallel()
	entitytest.Run(t, func(*testing.T) entitytest.Fixture {
		db := NewDB()
		view := NewView(db, "view")
		return entitytest.Fixture{
			Docs: NewDocuments(db, "docs"), Gone: NewDocuments(db, "gone"), Plain: NewPlainDocuments(db, "docs"),
			View: view, Viewed: view.All,
		}
	})
}

func TestSagasAndEntitiesRejectEachOthersTables(t *testing.T) {
	t.Parallel()
	db := NewDB()
	id := bson.RawValue{Type: bson.TypeString, Value: []byte("\x02\x00\x00\x00a\x00")}
	doc, err := bson.Marshal(bson.D{{Key: "_id", Value: id}})
	if err != nil {
		t.Fatal(err)
	}

	if _, err := newSagas(db).Prepare(t.Context(), sagas.Type{Name: "payments", Owner: "shop.Payment", ID: sagas.String}); err != nil {
		t.Fatal(err)
	}
	const want = "payments contains the sagas of shop.Payment"
	if err := NewPlainDocuments(db, "payments").Put(t.Context(), []bson.Raw{doc}); err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("an entity over sagas: %v", err)
	}
	if err := NewView(db, "payments").Apply(t.Context(), []entities.State{{ID: id, Version: 1, Doc: doc}}); err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("a projection over sagas: %v", err)
	}

	if err := NewPlainDocuments(db, "orders").Put(t.Context(), []bson.Raw{doc}); err != nil {
		t.Fatal(err)
	}
	if _, err := newSagas(db).Prepare(t.Context(), sagas.Type{Name: "orders", Owner: "shop.Order", ID: sagas.String}); !errors.Is(err, sagas.ErrOccupied) {
		t.Errorf("a saga over entities: %v", err)
	}
}
