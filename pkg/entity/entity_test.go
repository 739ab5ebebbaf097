package entity_test

import (
	"context"
	"errors"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
	"go.uber.org/goleak"

	"github.com/outrelay/outrelay/internal/contract/envelope"
	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/pkg/consumer"
	"github.com/outrelay/outrelay/pkg/entity"
	"github.com/outrelay/outrelay/pkg/event"
	"github.com/outrelay/outrelay/pkg/outbox"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(stacktest.Settled(m, goleak.Find)) }

type orderID string

type order struct {
	ID      orderID `bson:"id"` // stored as _id all the same
	Total   int64   `bson:"total"`
	Version int64   `bson:"-"`
}

func orderKey(o *order) *orderID   { return &o.ID }
func orderVersion(o *order) *int64 { return &o.Version }

// world contains the client, the database and the outbox of one test.
type world struct {
	t      *testing.T
	client *mongo.Client
	db     *mongo.Database
	box    *outbox.Box
}

func setup(t *testing.T, opts ...*options.ClientOptions) world {
	t.Helper()
	c := stacktest.Client(t, opts...)
	db := stacktest.Database(t, c)
	box, err := outbox.New(db)
	if err != nil {
		t.Fatal(err)
	}
	return world{t, c, db, box}
}

// tx runs fn in a transaction, which must commit.
func (w world) tx(fn func(ctx context.Context) error) {
	w.t.Helper()
	if err := w.box.Transaction(w.t.Context(), fn); err != nil {
		w.t.Fatal(err)
	}
}

func (w world) collection(opts ...entity.Option) *entity.Collection[order, orderID] {
	w.t.Helper()
	c, err := entity.New(w.db.Collection("orders"), orderKey, opts...)
	if err != nil {
		w.t.Fatal(err)
	}
	return c
}

func (w world) newRecorded(opts ...entity.Option) *entity.Recorded[order, orderID] {
	w.t.Helper()
	r, err := entity.NewRecorded(w.db.Collection("orders"), w.box, "order", orderKey, opts...)
	if err != nil {
		w.t.Fatal(err)
	}
	return r
}

// listStored returns the documents of a collection by _id, as Extended JSON.
func (w world) listStored(name string) []string {
	w.t.Helper()
	cur, err := w.db.Collection(name).Find(w.t.Context(), bson.D{}, options.Find().SetSort(bson.D{{Key: "_id", Value: 1}}))
	if err != nil {
		w.t.Fatal(err)
	}
	docs := []string{}
	for cur.Next(w.t.Context()) {
		js, err := bson.MarshalExtJSON(cur.Current, true, false)
		if err != nil {
			w.t.Fatal(err)
		}
		docs = append(docs, string(js))
	}

	if err := cur.Err(); err != nil {
		w.t.Fatal(err)
	}
	return docs
}

func (w world) checkDocuments(name string, docs ...string) {
	w.t.Helper()
	if diff := cmp.Diff(append([]string{}, docs...), w.listStored(name)); diff != "" {
		w.t.Errorf("in %s: %s", name, diff)
	}
}

// readMessages returns the events of the outbox from index from on, as a consumer would receive them.
func (w world) readMessages(from int) []*consumer.Message {
	w.t.Helper()
	cur, err := w.db.Collection("outbox").Find(w.t.Context(), bson.D{}, options.Find().SetSort(bson.D{{Key: "ts", Value: 1}}).SetSkip(int64(from)))
	if err != nil {
		w.t.Fatal(err)
	}
	var ms []*consumer.Message
	for cur.Next(w.t.Context()) {
		var v envelope.View
		if err := envelope.Parse(cur.Current, &v); err != nil {
			w.t.Fatal(err)
		}
		m := &consumer.Message{
			Topic: "t", Offset: int64(from + len(ms)), ID: string(v.AppendID(nil)), Name: string(v.Type),
			Key: append([]byte{}, v.OrderingKey()...),
		}
		if bson.Type(v.PayloadType) != bson.TypeNull {
			if m.Value, err = envelope.AppendPayload([]byte{}, &v); err != nil {
				w.t.Fatal(err)
			}
		}
		for it := v.Headers.Iter(); it.Next(); {
			m.Headers = append(m.Headers, event.Header{Key: string(it.Key), Value: append([]byte{}, it.Value...)})
		}
		ms = append(ms, m)
	}

	if err := cur.Err(); err != nil {
		w.t.Fatal(err)
	}
	return ms
}

// formatChanges converts messages to "change id version", so that they can be compared.
func formatChanges(ms []*consumer.Message) []string {
	list := []string{}
	for _, m := range ms {
		s := m.Name
		for _, h := range []string{"entity-id", "entity-version"} {
			v, _ := m.Header(h)
			s += " " + string(v)
		}
		list = append(list, s)
	}
	return list
}

func (w world) wantChanges(want ...string) {
	w.t.Helper()
	if diff := cmp.Diff(append([]string{}, want...), formatChanges(w.readMessages(0))); diff != "" {
		w.t.Errorf("recorded: %s", diff)
	}
}

func TestLoadRequiredAndOptional(t *testing.T) {
	t.Parallel()
	w := setup(t)
	c := w.collection()
	w.tx(func(ctx context.Context) error {
		_, err := c.Load(ctx, "o-1")
		if !errors.Is(err, entity.ErrMissing) || !strings.Contains(err.Error(), "orders o-1") {
			t.Errorf("required and missing: %v", err)
		}
		if _, ok, err := c.Find(ctx, "o-1"); ok || err != nil {
			t.Errorf("optional and missing: %v, %v", ok, err)
		}

		if _, err := c.Insert(ctx, order{ID: "o-1", Total: 5}); err != nil {
			return err
		}
		got, err := c.Load(ctx, "o-1")
		if want := (order{ID: "o-1", Total: 5}); got != want || err != nil {
			t.Errorf("required: %+v, %v", got, err)
		}

		got, ok, err := c.Find(ctx, "o-1")
		if !ok || err != nil || got.Total != 5 {
			t.Errorf("optional: %+v, %v, %v", got, ok, err)
		}
		return nil
	})
}

func TestInsertUpdateStoreDelete(t *testing.T) {
	t.Parallel()
	w := setup(t)
	c := w.collection()
	w.tx(func(ctx context.Context) error {
		if _, err := c.Update(ctx, order{ID: "o-1"}); !errors.Is(err, entity.ErrMissing) {
			t.Errorf("update of nothing: %v", err)
		}
		_, err1 := c.Insert(ctx, order{ID: "o-1", Total: 1})
		_, err2 := c.Update(ctx, order{ID: "o-1", Total: 2})
		_, err3 := c.Store(ctx, order{ID: "o-1", Total: 3}) // the last write wins
		_, err4 := c.Store(ctx, order{ID: "o-2", Total: 4})
		_, err5 := c.Insert(ctx, order{ID: "o-3", Total: 5})
		return errors.Join(err1, err2, err3, err4, err5)
	})

	w.tx(func(ctx context.Context) error {
		if ok, err := c.Delete(ctx, "o-3"); !ok || err != nil {
			t.Errorf("delete: %v, %v", ok, err)
		}
		if ok, err := c.Delete(ctx, "o-3"); ok || err != nil {
			t.Errorf("delete of nothing: %v, %v", ok, err)
		}
		if err := c.DeleteEntity(ctx, order{ID: "o-3"}); !errors.Is(err, entity.ErrMissing) {
			t.Errorf("delete of a required one: %v", err)
		}
		return nil
	})

	w.checkDocuments("orders", `{"_id":"o-1","id":"o-1","total":{"$numberLong":"3"}}`, `{"_id":"o-2","id":"o-2","total":{"$numberLong":"4"}}`)
	err := w.box.Transaction(t.Context(), func(ctx context.Context) error {
		_, err := c.Insert(ctx, order{ID: "o-1"})
		return err
	})

	if !errors.Is(err, entity.ErrExists) || !strings.Contains(err.Error(), "orders o-1") || !mongo.IsDuplicateKeyError(err) {
		t.Errorf("insert of an existing one: %v", err)
	}
}

// The violation of another unique index does not mean that the entity exists.
func TestAnotherUniqueIndex(t *testing.T) {
	t.Parallel()
	w := setup(t)
	if _, err := w.db.Collection("orders").Indexes().CreateOne(t.Context(), mongo.IndexModel{
		Keys: bson.D{{Key: "total", Value: 1}}, Options: options.Index().SetUnique(true),
	}); err != nil {
		t.Fatal(err)
	}

	c, r := w.collection(), w.newRecorded()
	w.tx(func(ctx context.Context) error { return just(c.Insert(ctx, order{ID: "a", Total: 1})) })
	for what, insert := range map[string]func(context.Context) error{
		"plain": func(ctx context.Context) error { return just(c.Insert(ctx, order{ID: "b", Total: 1})) },
		"recorded, swallowed": func(ctx context.Context) error {
			_ = just(r.Insert(ctx, order{ID: "b", Total: 1}))
			return nil
		},
	} {
		err := w.box.Transaction(t.Context(), insert)
		if errors.Is(err, entity.ErrExists) || !mongo.IsDuplicateKeyError(err) {
			t.Errorf("%s: %v", what, err)
		}
	}

	w.wantChanges()
}

// A field of the entity that has the name of the version field is not overwritten silently.
func TestFieldWithTheNameOfTheVersions(t *testing.T) {
	t.Parallel()
	w := setup(t)
	type release struct {
		ID      string `bson:"_id"`
		Version string
	}

	id := func(r *release) *string { return &r.ID }
	r, err := entity.NewRecorded(w.db.Collection("releases"), w.box, "release", id)
	if err != nil {
		t.Fatal(err)
	}
	named, err := entity.NewRecorded(w.db.Collection("releases"), w.box, "release", id, entity.WithVersionField("n"))
	if err != nil {
		t.Fatal(err)
	}
	w.tx(func(ctx context.Context) error {
		if err := just(r.Store(ctx, release{"a", "v1"})); err == nil {
			t.Error("overwritten")
		}
		return just(named.Store(ctx, release{"a", "v1"}))
	})

	w.checkDocuments("releases", `{"_id":"a","version":"v1","n":{"$numberLong":"1"}}`)
}

// All changes commit and roll back with the transaction, and no change happens without one.
func TestEntitiesAreBoundToTheTransaction(t *testing.T) {
	t.Parallel()
	w, ctx := setup(t), t.Context()
	c, r := w.collection(), w.newRecorded()
	calls := map[string]func(context.Context) error{
		"Load":         func(ctx context.Context) error { return just(c.Load(ctx, "a")) },
		"Find":         func(ctx context.Context) error { _, _, err := c.Find(ctx, "a"); return err },
		"Insert":       func(ctx context.Context) error { return just(c.Insert(ctx, order{ID: "a"})) },
		"Update":       func(ctx context.Context) error { return just(c.Update(ctx, order{ID: "a"})) },
		"Store":        func(ctx context.Context) error { return just(c.Store(ctx, order{ID: "a"})) },
		"Delete":       func(ctx context.Context) error { return just(c.Delete(ctx, "a")) },
		"recorded":     func(ctx context.Context) error { return just(r.Store(ctx, order{ID: "a"})) },
		"deleted":      func(ctx context.Context) error { return just(r.Delete(ctx, "a")) },
		"deleted all":  func(ctx context.Context) error { return just(r.DeleteAll(ctx)) },
		"deleted some": func(ctx context.Context) error { return just(r.DeleteMany(ctx, "a", "b")) },
	}

	for name, call := range calls {
		if err := call(ctx); !errors.Is(err, outbox.ErrNoTransaction) {
			t.Errorf("%s without a transaction: %v", name, err)
		}
	}

	no := errors.New("no")
	var leaked context.Context
	if err := w.box.Transaction(ctx, func(ctx context.Context) error {
		leaked = ctx
		return errors.Join(just(c.Insert(ctx, order{ID: "b"})), just(r.Store(ctx, order{ID: "a"})), just(r.Delete(ctx, "b")), no)
	}); !errors.Is(err, no) {
		t.Fatal(err)
	}

	for name, call := range calls {
		if err := call(leaked); !errors.Is(err, outbox.ErrTransactionEnded) {
			t.Errorf("%s in a transaction that is over: %v", name, err)
		}
	}

	w.checkDocuments("orders")
	w.checkDocuments("orders_deleted")
	w.wantChanges()
	plain := w.collection(entity.WithoutTransaction())
	if _, err := plain.Store(ctx, order{ID: "alone"}); err != nil {
		t.Errorf("allowed without a transaction: %v", err)
	}
	if _, err := entity.NewRecorded(w.db.Collection("orders"), w.box, "order", orderKey, entity.WithoutTransaction()); !errors.Is(err, entity.ErrRejected) {
		t.Errorf("a Recorded without transactions: %v", err)
	}
}

func just[R any](_ R, err error) error { return err }

// Versions begin at 1 and increase. An entity with an old version is neither written nor deleted.
func TestVersionGuard(t *testing.T) {
	t.Parallel()
	w := setup(t)
	if err := just(w.db.Collection("orders").InsertOne(t.Context(), bson.D{{Key: "_id", Value: "old"}, {Key: "total", Value: 7}})); err != nil {
		t.Fatal(err)
	}
	c := w.collection(entity.WithVersion(orderVersion))
	w.tx(func(ctx context.Context) error {
		v, err := c.Insert(ctx, order{ID: "a", Total: 1})
		if v != 1 || err != nil {
			t.Errorf("inserted as version %d, %v", v, err)
		}
		o, err := c.Load(ctx, "a")
		if err != nil || o.Version != 1 {
			t.Errorf("loaded %+v, %v", o, err)
		}
		if v, err = c.Update(ctx, o); v != 2 || err != nil {
			t.Errorf("updated to version %d, %v", v, err)
		}
		_, err = c.Update(ctx, o)
		if !errors.Is(err, entity.ErrStale) || !strings.Contains(err.Error(), "version 2 is stored, version 1 was given") {
			t.Errorf("a stale update: %v", err)
		}
		if err := c.DeleteEntity(ctx, o); !errors.Is(err, entity.ErrStale) {
			t.Errorf("a stale delete: %v", err)
		}
		if v, err = c.Store(ctx, order{ID: "a", Total: 9}); v != 3 || err != nil { // the last write wins
			t.Errorf("stored as version %d, %v", v, err)
		}
		if _, err := c.Update(ctx, order{ID: "b"}); !errors.Is(err, entity.ErrMissing) {
			t.Errorf("an update of nothing: %v", err)
		}
		// The entity was stored before there were versions.
		old, err := c.Load(ctx, "old")
		if err != nil || old.Version != 0 {
			t.Errorf("loaded %+v, %v", old, err)
		}
		if v, err = c.Update(ctx, old); v != 1 || err != nil {
			t.Errorf("updated to version %d, %v", v, err)
		}
		return nil
	})

	o := order{ID: "a", Version: 3}
	w.tx(func(ctx context.Context) error { return c.DeleteEntity(ctx, o) })
	w.checkDocuments("orders", `{"_id":"old","id":"old","total":{"$numberLong":"7"},"version":{"$numberLong":"1"}}`)
}

// Without transactions, no version is lost or used twice if several stores run at the same time.
func TestPlainStoresOfOneEntity(t *testing.T) {
	t.Parallel()
	w := setup(t)
	c := w.collection(entity.WithVersion(orderVersion), entity.WithoutTransaction())
	const writers = 4
	got := make(chan int64, writers)
	for i := range writers {
		go func() {
			v, err := c.Store(t.Context(), order{ID: "a", Total: int64(i)})
			if err != nil {
				t.Error(err)
			}
			got <- v
		}()
	}

	seen := map[int64]bool{}
	for range writers {
		seen[<-got] = true
	}
	if diff := cmp.Diff(map[int64]bool{1: true, 2: true, 3: true, 4: true}, seen); diff != "" {
		t.Error(diff)
	}
}

func TestNewReportsAllProblems(t *testing.T) {
	t.Parallel()
	coll := stacktest.Client(t).Database("x").Collection("y")
	for name, opts := range map[string][]entity.Option{
		"field": {entity.WithVersionField("a.b")}, "id": {entity.WithVersionField("_id")}, "chunk": {entity.WithChunk(-1)},
		"version": {entity.WithVersion(func(*int) *int64 { return nil })},
	} {
		if _, err := entity.New(coll, orderKey, opts...); err == nil {
			t.Errorf("%s was accepted", name)
		}
	}

	if _, err := entity.New[order, orderID](coll, nil); err == nil {
		t.Error("no function of the id was accepted")
	}
	if _, err := entity.NewRecorded(coll, nil, "", orderKey); err == nil {
		t.Error("no outbox and no name were accepted")
	}
	if _, err := entity.NewProjector[order, orderID](coll, ""); err == nil {
		t.Error("a projector without a name was accepted")
	}
	if _, err := entity.NewProjector[order, orderID](coll, "x", entity.WithProjection(func(int) (any, error) { return nil, nil })); err == nil {
		t.Error("a projection of another type was accepted")
	}
}
