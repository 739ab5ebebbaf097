// Package entitytest contains the tests that every entityparts.Documents and entityparts.View must pass.
package entitytest

import (
	"bytes"
	"context"
	"errors"
	"slices"
	"testing"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/service/entityparts"
	"github.com/outrelay/outrelay/pkg/entity"
	"github.com/outrelay/outrelay/pkg/event"
	"github.com/outrelay/outrelay/pkg/outbox"
)

// Fixture is an empty store for one test.
type Fixture struct {
	// Docs and Gone are the documents and the versions of deleted documents. They share
	// transactions.
	Docs, Gone entityparts.Documents

	// Plain contains the same documents as Docs, but does not require a transaction.
	Plain entityparts.Documents

	// View is a view whose documents have their version in the field "version".
	View entityparts.View

	// Viewed returns the documents of View in any order.
	Viewed func(ctx context.Context) ([]bson.Raw, error)
}

// Run runs the tests in parallel. factory returns a new Fixture for each test. It must register its
// cleanup with t.Cleanup.
func Run(t *testing.T, factory func(t *testing.T) Fixture) {
	for _, c := range []struct {
		name string
		test func(*testing.T, Fixture)
	}{
		{"a transaction is required", transactionIsRequired},
		{"found documents", findDocuments},
		{"pages", scanPages},
		{"an insert is of new documents", insertNewDocuments},
		{"puts and replacements", putAndReplace},
		{"guards", guardedChanges},
		{"a rollback leaves nothing", rollbackLeavesNothing},
		{"versions go on through deletion", versionsSurviveDeletion},
		{"a view goes only forward", viewGoesForward},
		{"a view rolls back", viewRollback},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			c.test(t, factory(t))
		})
	}
}

// newDoc returns a document. With version 0 it has no version.
func newDoc(id any, version int64, text string) bson.Raw {
	d := bson.D{{Key: "_id", Value: id}}
	if version > 0 {
		d = append(d, bson.E{Key: "version", Value: version})
	}

	raw, err := bson.Marshal(append(d, bson.E{Key: "text", Value: text}))
	if err != nil {
		// The encoding cannot fail: the values are constants of this package.
		panic(err)
	}

	return raw
}

// idValues returns ids as BSON values.
func idValues(values ...any) []bson.RawValue {
	list := make([]bson.RawValue, len(values))
	for i, v := range values {
		list[i] = newDoc(v, 0, "").Lookup("_id")
	}
	return list
}

// runTransaction runs fn in a transaction, which must commit.
func (f Fixture) runTransaction(t *testing.T, fn func(ctx context.Context) error) {
	t.Helper()
	if err := f.Docs.Transaction(t.Context(), fn); err != nil {
		t.Fatal(err)
	}
}

// checkDocuments fails the test unless d contains exactly docs.
func (f Fixture) checkDocuments(t *testing.T, d entityparts.Documents, docs ...bson.Raw) {
	t.Helper()
	f.runTransaction(t, func(ctx context.Context) error {
		got, err := d.Scan(ctx, bson.RawValue{}, 100)
		checkSame(t, d.Name(), got, docs)
		return err
	})
}

// checkSame compares two lists of documents and ignores their order.
func checkSame(t *testing.T, place string, got, want []bson.Raw) {
	t.Helper()
	got, want = slices.Clone(got), slices.Clone(want)
	for _, list := range [][]bson.Raw{got, want} {
		slices.SortFunc(list, func(a, b bson.Raw) int { return bytes.Compare(a, b) })
	}

	if !slices.EqualFunc(got, want, func(a, b bson.Raw) bool { return bytes.Equal(a, b) }) {
		t.Errorf("in %s: got %v, want %v", place, got, want)
	}
}

func transactionIsRequired(t *testing.T, f Fixture) {
	ctx := t.Context()
	a := newDoc("a", 1, "")
	calls := func(ctx context.Context, d entityparts.Documents) map[string]error {
		_, find := d.Find(ctx, idValues("a"))
		_, scan := d.Scan(ctx, bson.RawValue{}, 1)
		_, replace := d.Replace(ctx, a, nil)
		_, remove := d.Delete(ctx, idValues("a"), nil)
		return map[string]error{
			"Find":    find,
			"Scan":    scan,
			"Replace": replace,
			"Delete":  remove,
			"Put":     d.Put(ctx, []bson.Raw{a}),
		}
	}

	for name, err := range calls(ctx, f.Docs) {
		if !errors.Is(err, outbox.ErrNoTransaction) {
			t.Errorf("%s without a transaction: %v", name, err)
		}
	}

	if err := f.Docs.Insert(ctx, []bson.Raw{a}); !errors.Is(err, outbox.ErrNoTransaction) {
		t.Errorf("Insert without a transaction: %v", err)
	}

	f.checkDocuments(t, f.Docs)
	for name, err := range calls(ctx, f.Plain) {
		if err != nil {
			t.Errorf("%s of documents that need no transaction: %v", name, err)
		}
	}

	f.checkDocuments(t, f.Docs, a)
}

func findDocuments(t *testing.T, f Fixture) {
	one, text, long := newDoc(int32(1), 1, "int32"), newDoc("1", 1, "string"), newDoc(int64(2), 1, "int64")
	f.runTransaction(t, func(ctx context.Context) error {
		if err := f.Docs.Insert(ctx, []bson.Raw{one, text, long}); err != nil {
			return err
		}

		got, err := f.Docs.Find(ctx, idValues("1", "nobody", int64(2)))
		checkSame(t, "the transaction that wrote them", got, []bson.Raw{text, long})
		return err
	})

	f.runTransaction(t, func(ctx context.Context) error {
		got, err := f.Docs.Find(ctx, idValues("1"), "version")
		if len(got) != 1 || got[0].Lookup("version").AsInt64() != 1 || got[0].Lookup("_id").StringValue() != "1" {
			t.Errorf("one field of one document: %v", got)
		}

		none, err2 := f.Docs.Find(ctx, idValues("2", "nobody"))
		if len(none) != 0 {
			t.Errorf("found %v", none)
		}

		return errors.Join(err, err2)
	})
}

func scanPages(t *testing.T, f Fixture) {
	var all []bson.Raw
	for _, id := range []string{"c", "a", "e", "b", "d"} {
		all = append(all, newDoc(id, 1, id))
	}

	f.runTransaction(t, func(ctx context.Context) error { return f.Docs.Insert(ctx, all) })
	f.runTransaction(t, func(ctx context.Context) error {
		var seen []bson.Raw
		var after bson.RawValue
		for {
			page, err := f.Docs.Scan(ctx, after, 2)
			if err != nil || len(page) == 0 {
				checkSame(t, "all pages", seen, all)
				return err
			}

			if len(page) > 2 {
				t.Errorf("got a page of %d documents, want at most 2", len(page))
			}

			seen = append(seen, page...)
			after = page[len(page)-1].Lookup("_id")
		}
	})
}

func insertNewDocuments(t *testing.T, f Fixture) {
	a, b := newDoc("a", 1, "first"), newDoc("b", 1, "")
	f.runTransaction(t, func(ctx context.Context) error { return f.Docs.Insert(ctx, []bson.Raw{a}) })
	err := f.Docs.Transaction(t.Context(), func(ctx context.Context) error {
		return f.Docs.Insert(ctx, []bson.Raw{b, newDoc("a", 1, "again")})
	})
	if !errors.Is(err, entity.ErrExists) {
		t.Errorf("inserting an existing document: %v", err)
	}
	f.checkDocuments(t, f.Docs, a)
}

func putAndReplace(t *testing.T, f Fixture) {
	f.runTransaction(t, func(ctx context.Context) error {
		return f.Docs.Put(ctx, []bson.Raw{newDoc("a", 1, "first"), newDoc("b", 1, "first")})
	})
	a, b, c := newDoc("a", 2, "put"), newDoc("b", 2, "replaced"), newDoc("c", 1, "put")
	f.runTransaction(t, func(ctx context.Context) error {
		if err := f.Docs.Put(ctx, []bson.Raw{a, c}); err != nil {
			return err
		}

		ok, err := f.Docs.Replace(ctx, b, nil)
		none, err2 := f.Docs.Replace(ctx, newDoc("d", 1, ""), nil)
		if !ok || none {
			t.Errorf("replaced an existing document: %v, a missing one: %v", ok, none)
		}

		return errors.Join(err, err2)
	})

	f.checkDocuments(t, f.Docs, a, b, c)
	f.runTransaction(t, func(ctx context.Context) error {
		n, err := f.Docs.Delete(ctx, idValues("a", "c", "d"), nil)
		if n != 2 {
			t.Errorf("deleted %d documents, want 2", n)
		}

		return err
	})

	f.checkDocuments(t, f.Docs, b)
}

func guardedChanges(t *testing.T, f Fixture) {
	at := func(v int64) *entityparts.Guard { return &entityparts.Guard{Field: "version", Version: v} }
	f.runTransaction(t, func(ctx context.Context) error {
		return f.Docs.Put(ctx, []bson.Raw{newDoc("a", 3, ""), newDoc("old", 0, "")})
	})
	a, old := newDoc("a", 4, "new"), newDoc("old", 1, "new")
	f.runTransaction(t, func(ctx context.Context) error {
		stale, err1 := f.Docs.Replace(ctx, newDoc("a", 3, "stale"), at(2))
		first, err2 := f.Docs.Replace(ctx, newDoc("a", 1, "stale"), at(0))
		right, err3 := f.Docs.Replace(ctx, a, at(3))
		// The document is from before entities had versions.
		without, err4 := f.Docs.Replace(ctx, old, at(0))
		if stale || first || !right || !without {
			t.Errorf("replaced: stale %v, first %v, right %v, without a version %v", stale, first, right, without)
		}

		n, err5 := f.Docs.Delete(ctx, idValues("a", "old"), at(3))
		if n != 0 {
			t.Errorf("deleted %d documents of another version, want 0", n)
		}

		return errors.Join(err1, err2, err3, err4, err5)
	})

	f.checkDocuments(t, f.Docs, a, old)
	f.runTransaction(t, func(ctx context.Context) error {
		n, err := f.Docs.Delete(ctx, idValues("a", "old"), at(4))
		if n != 1 {
			t.Errorf("deleted %d documents, want 1", n)
		}

		return err
	})

	f.checkDocuments(t, f.Docs, old)
}

func rollbackLeavesNothing(t *testing.T, f Fixture) {
	a := newDoc("a", 1, "")
	f.runTransaction(t, func(ctx context.Context) error { return f.Docs.Insert(ctx, []bson.Raw{a}) })
	no := errors.New("no")
	change := func(ctx context.Context) error {
		_, err1 := f.Docs.Delete(ctx, idValues("a"), nil)
		return errors.Join(err1, f.Docs.Put(ctx, []bson.Raw{newDoc("b", 1, "")}), f.Gone.Put(ctx, []bson.Raw{newDoc("a", 2, "")}))
	}
	if err := f.Docs.Transaction(t.Context(), func(ctx context.Context) error { return errors.Join(change(ctx), no) }); !errors.Is(err, no) {
		t.Error(err)
	}

	if err := f.Docs.Transaction(t.Context(), func(ctx context.Context) error {
		if err := change(ctx); err != nil {
			return err
		}

		f.Docs.RollbackOnly(ctx, no)
		return nil
	}); !errors.Is(err, outbox.ErrRollbackOnly) || !errors.Is(err, no) {
		t.Errorf("rollback-only: %v", err)
	}

	if err := f.Docs.Transaction(t.Context(), func(ctx context.Context) error {
		return errors.Join(f.Docs.Transaction(ctx, change), no) // joined
	}); !errors.Is(err, no) {
		t.Error(err)
	}

	f.checkDocuments(t, f.Docs, a)
	f.checkDocuments(t, f.Gone)
}

type thing struct {
	ID   string `bson:"_id"`
	Text string `bson:"text"`
}

// eventCollector is an outbox that collects the events.
type eventCollector struct{ events []event.Event }

func (s *eventCollector) Append(_ context.Context, events ...event.Event) error {
	s.events = append(s.events, events...)
	return nil
}

func versionsSurviveDeletion(t *testing.T, f Fixture) {
	box := new(eventCollector)
	storage := entity.WithStorage(entityparts.Storage{Documents: f.Docs, Deleted: f.Gone, Append: box.Append})
	r, err := entity.NewRecorded(nil, nil, "thing", func(t *thing) *string { return &t.ID }, storage, entity.WithChunk(2))
	if err != nil {
		t.Fatal(err)
	}

	f.runTransaction(t, func(ctx context.Context) error {
		box.events = nil
		_, err := r.StoreMany(ctx, thing{"a", "1"}, thing{"b", "1"}, thing{"c", "1"})
		return err
	})

	f.runTransaction(t, func(ctx context.Context) error {
		_, err := r.Update(ctx, thing{"a", "2"})
		_, err2 := r.DeleteMany(ctx, "b", "c", "d")
		return errors.Join(err, err2)
	})

	f.runTransaction(t, func(ctx context.Context) error {
		v, err := r.Insert(ctx, thing{"b", "3"})
		if v != 3 {
			t.Errorf("got version %d after a deletion, want 3", v)
		}

		return err
	})

	f.checkDocuments(t, f.Docs,
		thingDoc("a", "2", 2), thingDoc("b", "3", 3))
	f.runTransaction(t, func(ctx context.Context) error {
		n, err := r.DeleteAll(ctx)
		if n != 2 {
			t.Errorf("DeleteAll deleted %d entities, want 2", n)
		}

		return err
	})

	f.checkDocuments(t, f.Docs)
	if len(box.events) < 9 {
		t.Errorf("got %d events, want at least 9", len(box.events))
	}
}

// thingDoc returns the document that a Recorded stores for a thing.
func thingDoc(id, text string, version int64) bson.Raw {
	raw, err := bson.Marshal(bson.D{{Key: "_id", Value: id}, {Key: "text", Value: text}, {Key: "version", Value: version}})
	if err != nil {
		// The encoding cannot fail: the values are constants of this package.
		panic(err)
	}
	return raw
}

// checkView fails the test unless the view contains exactly the documents of want.
func (f Fixture) checkView(t *testing.T, want ...bson.Raw) {
	t.Helper()
	got, err := f.Viewed(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	checkSame(t, f.View.Name(), got, want)
}

func viewGoesForward(t *testing.T, f Fixture) {
	a := idValues("a")[0]
	state := func(v int64) entityparts.State { return entityparts.State{ID: a, Version: v, Doc: newDoc("a", v, "x")} }
	gone := func(v int64) entityparts.State { return entityparts.State{ID: a, Version: v} }
	for _, step := range []struct {
		state entityparts.State
		want  []bson.Raw
	}{
		{state(2), []bson.Raw{newDoc("a", 2, "x")}},
		{state(1), []bson.Raw{newDoc("a", 2, "x")}},
		{state(2), []bson.Raw{newDoc("a", 2, "x")}},
		{gone(1), []bson.Raw{newDoc("a", 2, "x")}},
		{state(3), []bson.Raw{newDoc("a", 3, "x")}},
		{gone(5), nil},
		{state(4), nil},
		{gone(3), nil},
		{state(6), []bson.Raw{newDoc("a", 6, "x")}},
		{gone(5), []bson.Raw{newDoc("a", 6, "x")}},
		{gone(7), nil},
		{gone(7), nil},
		{state(7), nil},
	} {
		b := entityparts.State{ID: idValues("b")[0], Version: 1, Doc: newDoc("b", 1, "another entity")}
		if err := f.View.Apply(t.Context(), []entityparts.State{step.state, b}); err != nil {
			t.Fatal(err)
		}

		f.checkView(t, append(step.want, b.Doc)...)
	}

	if err := f.View.Apply(t.Context(), nil); err != nil {
		t.Errorf("nothing to apply: %v", err)
	}
}

func viewRollback(t *testing.T, f Fixture) {
	no := errors.New("no")
	states := []entityparts.State{{ID: idValues("a")[0], Version: 1, Doc: newDoc("a", 1, "x")}, {ID: idValues("b")[0], Version: 2}}
	err := f.Docs.Transaction(t.Context(), func(ctx context.Context) error {
		return errors.Join(f.View.Apply(ctx, states), no)
	})
	if !errors.Is(err, no) {
		t.Error(err)
	}

	f.checkView(t)
	// The deletion was rolled back too, so version 1 is not too old.
	b := entityparts.State{ID: idValues("b")[0], Version: 1, Doc: newDoc("b", 1, "x")}
	if err := f.View.Apply(t.Context(), []entityparts.State{b}); err != nil {
		t.Fatal(err)
	}

	f.checkView(t, b.Doc)
}
