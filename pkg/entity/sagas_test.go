package entity_test

import (
	"context"
	"errors"
	"strings"
	"testing"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/service/sagas"
	"github.com/outrelay/outrelay/pkg/consumer"
	"github.com/outrelay/outrelay/pkg/entity"
	"github.com/outrelay/outrelay/pkg/event"
	"github.com/outrelay/outrelay/pkg/outbox"
	"github.com/outrelay/outrelay/pkg/saga"
)

// payments returns the handler of a saga whose collection is orders.
func payments(t *testing.T, box *outbox.Box) (consumer.Handler, error) {
	t.Helper()
	s := saga.Define[struct{ Paid int64 }]("orders")
	saga.Start(s, event.Type[int64]{Aggregate: "order", Name: "Placed"}, func(_ context.Context, in *saga.Instance[struct{ Paid int64 }], cents int64) error {
		in.State.Paid = cents
		return nil
	})
	return s.Handler(box)
}

// placed is a message that starts the saga with this id.
func placed(id string) *consumer.Message {
	return &consumer.Message{ID: "m", Name: "Placed", Key: []byte(id), Value: []byte("42"), Aggregate: event.Aggregate{Type: "order", ID: id}}
}

func checkRejected(t *testing.T, call string, err error, want ...string) {
	t.Helper()
	for _, text := range want {
		if err == nil || !strings.Contains(err.Error(), text) {
			t.Errorf("%s: got %v, want %q in it", call, err, text)
		}
	}
}

func TestSagasAndEntitiesOfOneProcessRejectEachOther(t *testing.T) {
	t.Parallel()
	first := setup(t)
	if _, err := payments(t, first.box); err != nil {
		t.Fatal(err)
	}
	_, err := entity.New(first.db.Collection("orders"), orderKey)
	checkRejected(t, "New", err, "orders contains sagas in this process", "use another collection")
	_, err = entity.NewRecorded(first.db.Collection("orders"), first.box, "order", orderKey)
	checkRejected(t, "NewRecorded", err, "orders contains sagas in this process")
	_, err = entity.NewProjector[order, orderID](first.db.Collection("orders"), "order")
	checkRejected(t, "NewProjector", err, "orders contains sagas in this process")

	second := setup(t)
	second.collection()
	_, err = payments(t, second.box)
	checkRejected(t, "Handler", err, "orders contains entities in this process", "use another collection")
	if !errors.Is(err, saga.ErrDefinition) {
		t.Errorf("Handler: %v", err)
	}
}

// The saga belongs to another process, so New cannot see it. No method may touch its document.
func TestEntitiesRejectTheSagasOfAnotherProcess(t *testing.T) {
	t.Parallel()
	w := setup(t)
	other, err := outbox.New(stacktest.Client(t).Database(w.db.Name()))
	if err != nil {
		t.Fatal(err)
	}
	h, err := payments(t, other)
	if err != nil {
		t.Fatal(err)
	}
	if err := h.Handle(t.Context(), placed("o-1")); err != nil {
		t.Fatal(err)
	}
	before := w.listStored("orders")

	c, r := w.collection(), w.newRecorded()
	projector, err := entity.NewProjector[order, orderID](w.db.Collection("orders"), "order")
	if err != nil {
		t.Fatal(err)
	}
	change := w.recordedElsewhere(t)
	for call, do := range map[string]func(ctx context.Context) error{
		"Find":      func(ctx context.Context) error { _, _, err := c.Find(ctx, "o-1"); return err },
		"Insert":    func(ctx context.Context) error { return just(c.Insert(ctx, order{ID: "o-1"})) },
		"Store":     func(ctx context.Context) error { return just(c.Store(ctx, order{ID: "o-1"})) },
		"Update":    func(ctx context.Context) error { return just(c.Update(ctx, order{ID: "o-1"})) },
		"Delete":    func(ctx context.Context) error { _, err := c.Delete(ctx, "o-1"); return err },
		"Recorded":  func(ctx context.Context) error { return just(r.Store(ctx, order{ID: "o-1"})) },
		"Projector": func(ctx context.Context) error { return projector.Handle(ctx, change) },
	} {
		err := w.box.Transaction(t.Context(), do)
		checkRejected(t, call, err, w.db.Name()+".orders contains the sagas of struct { Paid int64 }", "use another collection")
	}

	if after := w.listStored("orders"); len(before) != 1 || len(after) != 1 || after[0] != before[0] {
		t.Errorf("the saga was %v and is %v", before, after)
	}
}

// recordedElsewhere returns the message of a change that another collection has recorded.
func (w world) recordedElsewhere(t *testing.T) *consumer.Message {
	t.Helper()
	r, err := entity.NewRecorded(w.db.Collection("source"), w.box, "order", orderKey)
	if err != nil {
		t.Fatal(err)
	}
	w.tx(func(ctx context.Context) error { return just(r.Store(ctx, order{ID: "o-1"})) })
	return w.readMessages(0)[0]
}

// The collection has entities of another process, so Handler cannot see them.
func TestASagaRejectsTheEntitiesOfAnotherProcess(t *testing.T) {
	t.Parallel()
	w := setup(t)
	w.tx(func(ctx context.Context) error { return just(w.collection().Insert(ctx, order{ID: "o-1"})) })
	before := w.listStored("orders")

	other, err := outbox.New(stacktest.Client(t).Database(w.db.Name()))
	if err != nil {
		t.Fatal(err)
	}
	h, err := payments(t, other)
	if err != nil {
		t.Fatal(err)
	}
	err = h.Handle(t.Context(), placed("o-1"))
	checkRejected(t, "Handle", err, w.db.Name()+".orders", "no sagas", "give the saga another name")
	if !errors.Is(err, saga.ErrDefinition) {
		t.Errorf("Handle: %v", err)
	}
	if after := w.listStored("orders"); len(after) != 1 || after[0] != before[0] {
		t.Errorf("the entity was %v and is %v", before, after)
	}
	if n, err := w.db.Collection(sagas.TypesCollection).CountDocuments(t.Context(), bson.D{}); n != 0 || err != nil {
		t.Errorf("%d types were stored, %v", n, err)
	}
}
