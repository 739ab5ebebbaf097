package integration

import (
	"context"
	"errors"
	"strings"
	"testing"

	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/pkg/entity"
	"github.com/outrelay/outrelay/pkg/event"
	"github.com/outrelay/outrelay/pkg/outbox"
	"github.com/outrelay/outrelay/pkg/saga"
)

// A saga and an entity that share a collection would overwrite each other's documents. The second one is rejected when it is built.
func TestSagasAndEntitiesShareNoCollection(t *testing.T) {
	t.Parallel()
	type note struct {
		ID   string `bson:"_id"`
		Note string
	}
	type state struct{ Name string }
	type begin struct{ ID string }
	began := event.Type[begin]{Aggregate: "order", Name: "Begun"}

	db := stacktest.Database(t, stacktest.Client(t))
	box, err := outbox.New(db)
	if err != nil {
		t.Fatal(err)
	}
	newEntity := func(name string) error {
		_, err := entity.New(db.Collection(name), func(n *note) *string { return &n.ID })
		return err
	}
	newSaga := func(name string) error {
		s := saga.Define[state](name)
		saga.Start(s, began, func(context.Context, *saga.Instance[state], begin) error { return nil })
		_, err := s.Handler(box)
		return err
	}

	if err := errors.Join(newSaga("orders"), newEntity("notes"), newSaga("orders"), newEntity("notes")); err != nil {
		t.Fatalf("collections of one kind each: %v", err)
	}
	if err := newEntity("orders"); err == nil || !strings.Contains(err.Error(), ".orders contains sagas") {
		t.Errorf("entities in the collection of a saga: %v", err)
	}
	if err := newSaga("notes"); !errors.Is(err, saga.ErrDefinition) || !strings.Contains(err.Error(), ".notes contains entities") {
		t.Errorf("a saga in the collection of entities: %v", err)
	}
	other := stacktest.Database(t, stacktest.Client(t))
	if _, err := entity.New(other.Collection("orders"), func(n *note) *string { return &n.ID }); err != nil {
		t.Errorf("the same name in another database: %v", err)
	}
}
