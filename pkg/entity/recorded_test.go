package entity_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/pkg/consumer"
	"github.com/outrelay/outrelay/pkg/entity"
	"github.com/outrelay/outrelay/pkg/event"
	"github.com/outrelay/outrelay/pkg/outbox"
)

func orders(n int) []order {
	list := make([]order, n)
	for i := range list {
		list[i] = order{ID: orderID(fmt.Sprintf("o-%03d", i)), Total: int64(i)}
	}
	return list
}

// Each change is one event with the entity and its version. The version continues after a deletion.
func TestEachChangeIsRecorded(t *testing.T) {
	t.Parallel()
	w := setup(t)
	r := w.newRecorded()
	step := func(want int64, do func(context.Context) (int64, error)) {
		t.Helper()
		w.tx(func(ctx context.Context) error {
			v, err := do(ctx)
			if v != want {
				t.Errorf("version %d, want %d", v, want)
			}
			return err
		})
	}

	step(1, func(ctx context.Context) (int64, error) { return r.Insert(ctx, order{ID: "a", Total: 1}) })
	step(2, func(ctx context.Context) (int64, error) { return r.Update(ctx, order{ID: "a", Total: 2}) })
	step(3, func(ctx context.Context) (int64, error) { return r.Store(ctx, order{ID: "a", Total: 3}) })
	w.tx(func(ctx context.Context) error { return just(r.Delete(ctx, "a")) })
	w.tx(func(ctx context.Context) error {
		// There is no entity to delete, and no change to record.
		ok, err := r.Delete(ctx, "a")
		if ok {
			t.Error("deleted twice")
		}
		return err
	})

	w.checkDocuments("orders_deleted", `{"_id":"a","version":{"$numberLong":"4"}}`)
	step(5, func(ctx context.Context) (int64, error) { return r.Insert(ctx, order{ID: "a", Total: 5}) })
	w.checkDocuments("orders_deleted")
	w.checkDocuments("orders", `{"_id":"a","id":"a","total":{"$numberLong":"5"},"version":{"$numberLong":"5"}}`)
	w.wantChanges("order.upserted string:a 1", "order.upserted string:a 2", "order.upserted string:a 3", "order.deleted string:a 4", "order.upserted string:a 5")
	ms := w.readMessages(0)
	if got, want := string(ms[1].Value), `{"_id":"a","id":"a","total":2,"version":2}`; got != want {
		t.Errorf("the payload is %s, want %s", got, want)
	}
	if got, want := string(ms[3].Value), `{"_id":"a","version":4}`; got != want {
		t.Errorf("the payload of a deletion is %s, want %s", got, want)
	}
	if string(ms[0].Key) != "a" {
		t.Errorf("the ordering key is %s", ms[0].Key)
	}
	w.tx(func(ctx context.Context) error { return just(w.newRecorded(entity.WithTombstones()).Delete(ctx, "a")) })
	if m := w.readMessages(5)[0]; !m.Tombstone() || m.Name != "order.deleted" {
		t.Errorf("no tombstone: %s %q", m.Name, m.Value)
	}
}

func TestRecordedGuards(t *testing.T) {
	t.Parallel()
	w := setup(t)
	r := w.newRecorded(entity.WithVersion(orderVersion))
	w.tx(func(ctx context.Context) error {
		if err := just(r.Insert(ctx, order{ID: "a"})); err != nil {
			return err
		}
		o, err := r.Load(ctx, "a")
		if err != nil || o.Version != 1 {
			t.Errorf("loaded %+v, %v", o, err)
		}
		if v, err := r.Update(ctx, o); v != 2 || err != nil {
			t.Errorf("updated to %d, %v", v, err)
		}
		for what, c := range map[string]struct{ got, want error }{
			"insert of an existing one": {just(r.Insert(ctx, order{ID: "a"})), entity.ErrExists},
			"stale update":              {just(r.Update(ctx, o)), entity.ErrStale},
			"stale delete":              {r.DeleteEntity(ctx, o), entity.ErrStale},
			"update of nothing":         {just(r.Update(ctx, order{ID: "b"})), entity.ErrMissing},
			"delete of nothing":         {r.DeleteEntity(ctx, order{ID: "b"}), entity.ErrMissing},
			"twice in one call":         {just(r.StoreMany(ctx, order{ID: "c"}, order{ID: "c"})), entity.ErrRejected},
			"deleted twice in one call": {just(r.DeleteMany(ctx, "a", "a")), entity.ErrRejected},
			"no id":                     {just(r.StoreMany(ctx, order{ID: "c"}, order{})), entity.ErrNoID},
		} {
			if !errors.Is(c.got, c.want) {
				t.Errorf("%s: %v", what, c.got)
			}
		}
		o.Version = 2
		// The rejected changes sent no statements, so the transaction continues.
		return r.DeleteEntity(ctx, o)
	})

	w.checkDocuments("orders")
	w.wantChanges("order.upserted string:a 1", "order.upserted string:a 2", "order.deleted string:a 3")
}

// Calls for many entities record one event for each, with one statement per chunk, in one
// transaction.
func TestManyAndAllAreRecorded(t *testing.T) {
	t.Parallel()
	w := setup(t)
	r := w.newRecorded(entity.WithChunk(3))
	list := orders(7)
	var want []string
	note := func(change string, version int, from, to int) {
		for i := from; i < to; i++ {
			want = append(want, fmt.Sprintf("order.%s string:%s %d", change, list[i].ID, version))
		}
	}

	w.tx(func(ctx context.Context) error {
		vs, err := r.InsertMany(ctx, list[:5]...)
		if diff := cmp.Diff([]int64{1, 1, 1, 1, 1}, vs); diff != "" {
			t.Error(diff)
		}
		return err
	})

	note("upserted", 1, 0, 5)
	w.tx(func(ctx context.Context) error { return just(r.UpdateMany(ctx, list[:5]...)) })
	note("upserted", 2, 0, 5)
	w.tx(func(ctx context.Context) error {
		n, err := r.DeleteMany(ctx, list[4].ID, list[5].ID, "nobody", "no one")
		if n != 1 {
			t.Errorf("%d deleted", n)
		}
		return err
	})

	note("deleted", 3, 4, 5)
	// Some of the entities exist, one existed before, and some never existed.
	w.tx(func(ctx context.Context) error {
		vs, err := r.StoreMany(ctx, list...)
		if diff := cmp.Diff([]int64{3, 3, 3, 3, 4, 1, 1}, vs); diff != "" {
			t.Error(diff)
		}
		return err
	})

	note("upserted", 3, 0, 4)
	note("upserted", 4, 4, 5)
	note("upserted", 1, 5, 7)
	w.wantChanges(want...)
	w.tx(func(ctx context.Context) error {
		n, err := r.DeleteAll(ctx)
		if n != 7 {
			t.Errorf("%d deleted of all", n)
		}
		return err
	})

	note("deleted", 4, 0, 4)
	note("deleted", 5, 4, 5)
	note("deleted", 2, 5, 7)
	w.wantChanges(want...)
	w.checkDocuments("orders")
	w.tx(func(ctx context.Context) error {
		_, err := r.StoreMany(ctx)
		return errors.Join(err, just(r.DeleteMany(ctx)), just(r.DeleteAll(ctx)))
	})

	w.wantChanges(want...)
}

// If a call for many entities fails in the middle, nothing is stored, even if its error is ignored.
func TestManyAreAllOrNothing(t *testing.T) {
	t.Parallel()
	w := setup(t)
	small, err := outbox.New(w.db, outbox.WithMaxSize(1000))
	if err != nil {
		t.Fatal(err)
	}
	type note struct {
		ID   int32 `bson:"_id"`
		Text string
	}

	r, err := entity.NewRecorded(w.db.Collection("notes"), small, "note", func(n *note) *int32 { return &n.ID }, entity.WithChunk(1))
	if err != nil {
		t.Fatal(err)
	}
	large := string(bytes.Repeat([]byte("x"), 1000))
	err = w.box.Transaction(t.Context(), func(ctx context.Context) error {
		if err := just(r.InsertMany(ctx, note{1, ""}, note{2, large})); !errors.Is(err, outbox.ErrTooLarge) {
			t.Errorf("a large one: %v", err)
		}
		return nil
	})

	if !errors.Is(err, outbox.ErrRollbackOnly) || !errors.Is(err, outbox.ErrTooLarge) {
		t.Error(err)
	}
	// A call that has not begun to write can fail without consequences.
	w.tx(func(ctx context.Context) error {
		if err := just(r.Insert(ctx, note{2, large})); !errors.Is(err, outbox.ErrTooLarge) {
			t.Errorf("a large one alone: %v", err)
		}
		return just(r.Insert(ctx, note{3, ""}))
	})

	w.checkDocuments("notes", `{"_id":{"$numberInt":"3"},"text":"","version":{"$numberLong":"1"}}`)
	w.wantChanges("note.upserted int32:3 1")
}

func TestChunksHaveTheirOwnTransactions(t *testing.T) {
	t.Parallel()
	w, ctx := setup(t), t.Context()
	r := w.newRecorded(entity.WithChunk(3))
	w.tx(func(ctx context.Context) error { return just(r.StoreMany(ctx, orders(7)...)) })
	if n, err := r.RecordAll(ctx); n != 7 || err != nil {
		t.Errorf("%d recorded, %v", n, err)
	}
	if got := len(w.readMessages(0)); got != 14 {
		t.Errorf("%d events", got)
	}

	no := errors.New("no")
	if err := w.box.Transaction(ctx, func(ctx context.Context) error { // joined
		return errors.Join(just(r.RecordAll(ctx)), no)
	}); !errors.Is(err, no) {
		t.Error(err)
	}
	if got := len(w.readMessages(0)); got != 14 {
		t.Errorf("%d events after a transaction that was rolled back", got)
	}
}

// A change during RecordAll is before or after its event, so the last event of an entity, which a compacted topic keeps, has its
// latest state.
func TestRecordAllDoesNotFollowALaterChange(t *testing.T) {
	t.Parallel()
	w := setup(t)
	change := func() error { return nil }
	box, err := outbox.New(w.db, outbox.WithMiddleware(func(next outbox.AppendFunc) outbox.AppendFunc {
		return func(ctx context.Context, ev event.Event) error { return errors.Join(change(), next(ctx, ev)) }
	}))
	if err != nil {
		t.Fatal(err)
	}
	plain := w.newRecorded()
	w.box, box = box, w.box
	r := w.newRecorded()
	w.box = box
	w.tx(func(ctx context.Context) error { return just(plain.InsertMany(ctx, order{ID: "a"}, order{ID: "b"})) })

	// The changes are committed after RecordAll has read the entities.
	change = func() error {
		change = func() error { return nil }
		return w.box.Transaction(t.Context(), func(ctx context.Context) error {
			return errors.Join(just(plain.Store(ctx, order{ID: "a", Total: 5})), just(plain.Delete(ctx, "b")))
		})
	}
	if n, err := r.RecordAll(t.Context()); n != 1 || err != nil {
		t.Errorf("%d recorded, %v; want only entity a", n, err)
	}
	w.wantChanges("order.upserted string:a 1", "order.upserted string:b 1", "order.upserted string:a 2", "order.deleted string:b 2", "order.upserted string:a 2")
	w.checkDocuments("orders", `{"_id":"a","id":"a","total":{"$numberLong":"5"},"version":{"$numberLong":"2"}}`)
}

// With two writers of one entity, every version is used once, whichever writer is first.
func TestWritersOfOneEntityCountTogether(t *testing.T) {
	t.Parallel()
	w := setup(t)
	r := w.newRecorded()
	const writers, each = 3, 6
	var wg sync.WaitGroup
	for i := range writers {
		wg.Go(func() {
			for n := range each {
				err := w.box.Transaction(t.Context(), func(ctx context.Context) error {
					if n%3 == 2 {
						return just(r.Delete(ctx, "a"))
					}
					return just(r.Store(ctx, order{ID: "a", Total: int64(i)}))
				})
				if err != nil {
					t.Error(err)
				}
			}
		})
	}

	wg.Wait()
	for i, m := range w.readMessages(0) {
		v, _ := m.Header("entity-version")
		if got, want := string(v), fmt.Sprint(i+1); got != want {
			t.Fatalf("event %d has version %s", i+1, got)
		}
	}
}

func (w world) projector(opts ...entity.Option) *entity.Projector[order, orderID] {
	w.t.Helper()
	p, err := entity.NewProjector[order, orderID](w.db.Collection("view"), "order", opts...)
	if err != nil {
		w.t.Fatal(err)
	}
	return p
}

// history returns the messages for a few changes of one entity.
func (w world) history() []*consumer.Message {
	w.t.Helper()
	r := w.newRecorded(entity.WithTombstones())
	for _, do := range []func(context.Context) error{
		func(ctx context.Context) error { return just(r.Insert(ctx, order{ID: "a", Total: 1})) },
		func(ctx context.Context) error { return just(r.Update(ctx, order{ID: "a", Total: 2})) },
		func(ctx context.Context) error { return just(r.Delete(ctx, "a")) },
		func(ctx context.Context) error { return just(r.Insert(ctx, order{ID: "a", Total: 4})) },
	} {
		w.tx(do)
	}
	return w.readMessages(0)
}

// In any order and with any repetitions of the changes, alone or in batches, the view ends at the
// newest version.
func TestProjectorGoesOnlyForward(t *testing.T) {
	t.Parallel()
	w := setup(t)
	ms := w.history()
	newest := []string{
		`{"_id":"a","id":"a","total":{"$numberLong":"1"},"version":{"$numberLong":"1"}}`,
		`{"_id":"a","id":"a","total":{"$numberLong":"2"},"version":{"$numberLong":"2"}}`,
		"",
		`{"_id":"a","id":"a","total":{"$numberLong":"4"},"version":{"$numberLong":"4"}}`,
	}

	n := 0
	for _, order := range [][]int{{0, 1, 2, 3}, {3, 2, 1, 0}, {2, 1}, {2, 0, 2}, {1, 2, 3}, {0, 2, 1, 0}, {3, 2, 3}, {1, 0, 0, 1}, {2, 3, 0}} {
		for _, batched := range []bool{false, true} {
			n++
			coll := fmt.Sprintf("view%d", n)
			p, err := entity.NewProjector[orderDoc, orderID](w.db.Collection(coll), "order")
			if err != nil {
				t.Fatal(err)
			}
			var list []*consumer.Message
			for _, i := range order {
				list = append(list, ms[i])
			}
			if batched {
				if err := p.HandleBatch(t.Context(), list); err != nil {
					t.Fatal(err)
				}
			} else {
				for _, m := range list {
					if err := p.Handle(t.Context(), m); err != nil {
						t.Fatal(err)
					}
				}
			}
			if want := newest[slices.Max(order)]; want == "" {
				w.checkDocuments(coll)
			} else {
				w.checkDocuments(coll, want)
			}
		}
	}
}

type orderDoc struct {
	ID    orderID `bson:"id"`
	Total int64   `bson:"total"`
}

// In the handler's transaction, the projection rolls back with it. In a database of another client
// it stays, and happens once.
func TestProjectorInAndBesideATransaction(t *testing.T) {
	t.Parallel()
	w, other := setup(t), setup(t)
	ms := w.history()
	no := errors.New("no")
	here := w.projector()
	there, err := entity.NewProjector[order, orderID](other.db.Collection("view"), "order")
	if err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := w.box.Transaction(t.Context(), func(ctx context.Context) error {
			for _, m := range ms {
				if err := errors.Join(here.Handle(ctx, m), there.Handle(ctx, m)); err != nil {
					return err
				}
			}
			return no
		}); !errors.Is(err, no) {
			t.Fatal(err)
		}
	}

	w.checkDocuments("view")
	other.checkDocuments("view", `{"_id":"a","id":"a","total":{"$numberLong":"4"},"version":{"$numberLong":"4"}}`)
	w.tx(func(ctx context.Context) error { return here.HandleBatch(ctx, ms) })
	w.checkDocuments("view", `{"_id":"a","id":"a","total":{"$numberLong":"4"},"version":{"$numberLong":"4"}}`)
}

// A message that the projector does not understand is an error, and nothing of it is written.
func TestProjectorRejectsIncompleteMessages(t *testing.T) {
	t.Parallel()
	w := setup(t)
	good := w.history()[0]
	p := w.projector()
	for name, change := range map[string]func(m *consumer.Message){
		"another name":       func(m *consumer.Message) { m.SetHeader("entity-name", []byte("customer")) },
		"no name":            func(m *consumer.Message) { m.DeleteHeader("entity-name") },
		"another change":     func(m *consumer.Message) { m.SetHeader("entity-change", []byte("truncated")) },
		"no id":              func(m *consumer.Message) { m.DeleteHeader("entity-id") },
		"an empty id":        func(m *consumer.Message) { m.SetHeader("entity-id", []byte("string:")) },
		"another kind of id": func(m *consumer.Message) { m.SetHeader("entity-id", []byte("int64:5")) },
		"no version":         func(m *consumer.Message) { m.DeleteHeader("entity-version") },
		"version zero":       func(m *consumer.Message) { m.SetHeader("entity-version", []byte("0")) },
		"no value":           func(m *consumer.Message) { m.Value = nil },
		"an empty value":     func(m *consumer.Message) { m.Value = []byte{} },
		"no JSON":            func(m *consumer.Message) { m.Value = []byte("total") },
		"another shape":      func(m *consumer.Message) { m.Value = []byte(`{"total":"many"}`) },
		"two documents":      func(m *consumer.Message) { m.Value = []byte(`{"total":1}{"total":2}`) },
		"a foreign event": func(m *consumer.Message) {
			m.Headers, m.Name = nil, "OrderPlaced"
		},
	} {
		m := good.Clone()
		change(m)
		err := p.Handle(t.Context(), m)
		if !errors.Is(err, entity.ErrUnknownChange) || !errors.Is(err, consumer.ErrMalformed) || !strings.Contains(err.Error(), m.ID) {
			t.Errorf("%s: %v", name, err)
		}
		if err != nil && bytes.Contains([]byte(err.Error()), []byte("many")) {
			t.Errorf("%s: the error quotes the payload: %v", name, err)
		}
	}

	w.checkDocuments("view")
	w.checkDocuments("view_deleted")
}

// A view of another form, and a view that is filled later while the entities continue to change.
func TestRebuild(t *testing.T) {
	t.Parallel()
	w := setup(t)
	if err := just(w.db.Collection("orders").InsertOne(t.Context(), bson.D{{Key: "_id", Value: "old"}, {Key: "total", Value: int64(7)}})); err != nil {
		t.Fatal(err)
	}
	r := w.newRecorded(entity.WithChunk(2))
	w.tx(func(ctx context.Context) error { return just(r.InsertMany(ctx, orders(4)...)) })
	before := len(w.readMessages(0))
	if n, err := r.RecordAll(t.Context()); n != 5 || err != nil {
		t.Fatalf("%d recorded, %v", n, err)
	}
	w.tx(func(ctx context.Context) error {
		return errors.Join(just(r.Store(ctx, order{ID: "o-001", Total: 50})), just(r.Delete(ctx, "o-002")))
	})
	ms := w.readMessages(before)
	slices.Reverse(ms)
	double := w.projector(entity.WithVersionField("v"), entity.WithProjection(func(o order) (any, error) {
		return bson.D{{Key: "double", Value: 2 * o.Total}}, nil
	}))
	if err := double.HandleBatch(t.Context(), ms[:3]); err != nil {
		t.Fatal(err)
	}
	for _, m := range ms {
		if err := double.Handle(t.Context(), m); err != nil {
			t.Fatal(err)
		}
	}

	line := func(id string, double, version int) string {
		return fmt.Sprintf(`{"_id":"%s","double":{"$numberLong":"%d"},"v":{"$numberLong":"%d"}}`, id, double, version)
	}
	w.checkDocuments("view", line("o-000", 0, 1), line("o-001", 100, 2), line("o-003", 6, 1), line("old", 14, 1))
	no := errors.New("no")
	failing := w.projector(entity.WithProjection(func(order) (any, error) { return nil, no }))
	// A deletion is not projected.
	if err := failing.Handle(t.Context(), ms[0]); err != nil {
		t.Error(err)
	}
	if err := failing.Handle(t.Context(), ms[1]); !errors.Is(err, no) {
		t.Error(err)
	}
}

var errOutbox = errors.New("the outbox rejects all events")

// There is no change without its event.
func TestNothingIsWrittenWithoutItsEvent(t *testing.T) {
	t.Parallel()
	w := setup(t)
	failing, err := outbox.New(w.db, outbox.WithMiddleware(func(outbox.AppendFunc) outbox.AppendFunc {
		return func(context.Context, event.Event) error { return errOutbox }
	}))
	if err != nil {
		t.Fatal(err)
	}
	r, err := entity.NewRecorded(w.db.Collection("orders"), failing, "order", orderKey)
	if err != nil {
		t.Fatal(err)
	}
	w.tx(func(ctx context.Context) error {
		if err := just(w.newRecorded().Insert(ctx, order{ID: "a", Total: 1})); err != nil {
			return err
		}
		for what, err := range map[string]error{
			"insert": just(r.Insert(ctx, order{ID: "b"})), "update": just(r.Update(ctx, order{ID: "a"})),
			"delete": just(r.Delete(ctx, "a")), "all": just(r.DeleteAll(ctx)),
		} {
			if !errors.Is(err, errOutbox) {
				t.Errorf("%s: %v", what, err)
			}
		}
		return nil
	})

	w.checkDocuments("orders", `{"_id":"a","id":"a","total":{"$numberLong":"1"},"version":{"$numberLong":"1"}}`)
	w.wantChanges("order.upserted string:a 1")
}
