// Package entitytest contains the tests that every entities.Documents and entities.View must pass.
package entitytest

import (
	"bytes"
	"context"
	"errors"
	"slices"
	"testing"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/service/entities"
	"github.com/outrelay/outrelay/pkg/entity"
	"github.com/outrelay/outrelay/pkg/event"
	"github.com/outrelay/outrelay/pkg/outbox"
)

// Fixture is an empty store for one test.
type Fixture struct {
	// Docs and Gone are the documents and the versions of deleted documents. They share
	// transactions.
	Docs, Gone entities.Documents

	// Plain contains the same documents as Docs, but does not require a transaction.
	Plain entities.Documents

	// View is a view whose documents have their version in the field "version".
	View entities.View

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
	document := bson.D{{Key: "_id", Value: id}}
	if version > 0 {
		document = append(document, bson.E{Key: "version", Value: version})
	}

	raw, err := bson.Marshal(append(document, bson.E{Key: "text", Value: text}))
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

// checkDocuments fails the test unless documents contains exactly docs.
func (f Fixture) checkDocuments(t *testing.T, documents entities.Documents, docs ...bson.Raw) {
	t.Helper()
	f.runTransaction(t, func(ctx context.Context) error {
		got, err := documents.Scan(ctx, bson.RawValue{}, 100)
		checkSame(t, documents.Name(), got, docs)
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

func transactionIsRequired(t *testing.T, fixture Fixture) {
	ctx := t.Context()
	raw := newDoc("a", 1, "")
	calls := func(ctx context.Context, documents entities.Documents) map[string]error {
		_, find := documents.Find(ctx, idValues("a"))
		_, scan := documents.Scan(ctx, bson.RawValue{}, 1)
		_, replace := documents.Replace(ctx, raw, nil)
		_, remove := documents.Delete(ctx, idValues("a"), nil)
		return map[string]error{
			"Find":    find,
			"Scan":    scan,
			"Replace": replace,
			"Delete":  remove,
			"Put":     documents.Put(ctx, []bson.Raw{raw}),
		}
	}

	for name, err := range calls(ctx, fixture.Docs) {
		if !errors.Is(err, outbox.ErrNoTransaction) {
			t.Errorf("%s without a transaction: %v", name, err)
		}
	}

	if err := fixture.Docs.Insert(ctx, []bson.Raw{raw}); !errors.Is(err, outbox.ErrNoTransaction) {
		t.Errorf("Insert without a transaction: %v", err)
	}

	fixture.checkDocuments(t, fixture.Docs)
	for name, err := range calls(ctx, fixture.Plain) {
		if err != nil {
			t.Errorf("%s of documents that need no transaction: %v", name, err)
		}
	}

	fixture.checkDocuments(t, fixture.Docs, raw)
}

func findDocuments(t *testing.T, fixture Fixture) {
	one, text, long := newDoc(int32(1), 1, "int32"), newDoc("1", 1, "string"), newDoc(int64(2), 1, "int64")
	fixture.runTransaction(t, func(ctx context.Context) error {
		if err := fixture.Docs.Insert(ctx, []bson.Raw{one, text, long}); err != nil {
			return err
		}

		got, err := fixture.Docs.Find(ctx, idValues("1", "nobody", int64(2)))
		checkSame(t, "the transaction that wrote them", got, []bson.Raw{text, long})
		return err
	})

	fixture.runTransaction(t, func(ctx context.Context) error {
		got, err := fixture.Docs.Find(ctx, idValues("1"), "version")
		if len(got) != 1 || got[0].Lookup("version").AsInt64() != 1 || got[0].Lookup("_id").StringValue() != "1" {
			t.Errorf("one field of one document: %v", got)
		}

		none, err2 := fixture.Docs.Find(ctx, idValues("2", "nobody"))
		if len(none) != 0 {
			t.Errorf("found %v", none)
		}

		return errors.Join(err, err2)
	})
}

func scanPages(t *testing.T, fixture Fixture) {
	var all []bson.Raw
	for _, id := range []string{"c", "a", "e", "b", "d"} {
		all = append(all, newDoc(id, 1, id))
	}

	fixture.runTransaction(t, func(ctx context.Context) error { return fixture.Docs.Insert(ctx, all) })
	fixture.runTransaction(t, func(ctx context.Context) error {
		var seen []bson.Raw
		var after bson.RawValue
		for {
			page, err := fixture.Docs.Scan(ctx, after, 2)
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

func insertNewDocuments(t *testing.T, fixture Fixture) {
	raw, document := newDoc("a", 1, "first"), newDoc("b", 1, "")
	fixture.runTransaction(t, func(ctx context.Context) error { return fixture.Docs.Insert(ctx, []bson.Raw{raw}) })
	err := fixture.Docs.Transaction(t.Context(), func(ctx context.Context) error {
		return fixture.Docs.Insert(ctx, []bson.Raw{document, newDoc("a", 1, "again")})
	})
	if !errors.Is(err, entity.ErrExists) {
		t.Errorf("inserting an existing document: %v", err)
	}
	fixture.checkDocuments(t, fixture.Docs, raw)
}

func putAndReplace(t *testing.T, fixture Fixture) {
	fixture.runTransaction(t, func(ctx context.Context) error {
		return fixture.Docs.Put(ctx, []bson.Raw{newDoc("a", 1, "first"), newDoc("b", 1, "first")})
	})
	first, second, third := newDoc("a", 2, "put"), newDoc("b", 2, "replaced"), newDoc("c", 1, "put")
	fixture.runTransaction(t, func(ctx context.Context) error {
		if err := fixture.Docs.Put(ctx, []bson.Raw{first, third}); err != nil {
			return err
		}

		ok, err := fixture.Docs.Replace(ctx, second, nil)
		none, err2 := fixture.Docs.Replace(ctx, newDoc("d", 1, ""), nil)
		if !ok || none {
			t.Errorf("replaced an existing document: %v, a missing one: %v", ok, none)
		}

		return errors.Join(err, err2)
	})

	fixture.checkDocuments(t, fixture.Docs, first, second, third)
	fixture.runTransaction(t, func(ctx context.Context) error {
		n, err := fixture.Docs.Delete(ctx, idValues("a", "c", "d"), nil)
		if n != 2 {
			t.Errorf("deleted %d documents, want 2", n)
		}

		return err
	})

	fixture.checkDocuments(t, fixture.Docs, second)
}

func guardedChanges(t *testing.T, fixture Fixture) {
	at := func(version int64) *entities.Guard { return &entities.Guard{Field: "version", Version: version} }
	fixture.runTransaction(t, func(ctx context.Context) error {
		return fixture.Docs.Put(ctx, []bson.Raw{newDoc("a", 3, ""), newDoc("old", 0, "")})
	})
	raw, old := newDoc("a", 4, "new"), newDoc("old", 1, "new")
	fixture.runTransaction(t, func(ctx context.Context) error {
		stale, err1 := fixture.Docs.Replace(ctx, newDoc("a", 3, "stale"), at(2))
		first, err2 := fixture.Docs.Replace(ctx, newDoc("a", 1, "stale"), at(0))
		right, err3 := fixture.Docs.Replace(ctx, raw, at(3))
		// The document is from before entities had versions.
		without, err4 := fixture.Docs.Replace(ctx, old, at(0))
		if stale || first || !right || !without {
			t.Errorf("replaced: stale %v, first %v, right %v, without a version %v", stale, first, right, without)
		}

		n, err5 := fixture.Docs.Delete(ctx, idValues("a", "old"), at(3))
		if n != 0 {
			t.Errorf("deleted %d documents of another version, want 0", n)
		}

		return errors.Join(err1, err2, err3, err4, err5)
	})

	fixture.checkDocuments(t, fixture.Docs, raw, old)
	fixture.runTransaction(t, func(ctx context.Context) error {
		n, err := fixture.Docs.Delete(ctx, idValues("a", "old"), at(4))
		if n != 1 {
			t.Errorf("deleted %d documents, want 1", n)
		}

		return err
	})

	fixture.checkDocuments(t, fixture.Docs, old)
}

func rollbackLeavesNothing(t *testing.T, fixture Fixture) {
	raw := newDoc("a", 1, "")
	fixture.runTransaction(t, func(ctx context.Context) error { return fixture.Docs.Insert(ctx, []bson.Raw{raw}) })
	no := errors.New("no")
	change := func(ctx context.Context) error {
		_, err1 := fixture.Docs.Delete(ctx, idValues("a"), nil)
		return errors.Join(err1, fixture.Docs.Put(ctx, []bson.Raw{newDoc("b", 1, "")}), fixture.Gone.Put(ctx, []bson.Raw{newDoc("a", 2, "")}))
	}
	if err := fixture.Docs.Transaction(t.Context(), func(ctx context.Context) error { return errors.Join(change(ctx), no) }); !errors.Is(err, no) {
		t.Error(err)
	}

	if err := fixture.Docs.Transaction(t.Context(), func(ctx context.Context) error {
		if err := change(ctx); err != nil {
			return err
		}

		fixture.Docs.RollbackOnly(ctx, no)
		return nil
	}); !errors.Is(err, outbox.ErrRollbackOnly) || !errors.Is(err, no) {
		t.Errorf("rollback-only: %v", err)
	}

	if err := fixture.Docs.Transaction(t.Context(), func(ctx context.Context) error {
		return errors.Join(fixture.Docs.Transaction(ctx, change), no) // joined
	}); !errors.Is(err, no) {
		t.Error(err)
	}

	fixture.checkDocuments(t, fixture.Docs, raw)
	fixture.checkDocuments(t, fixture.Gone)
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

func versionsSurviveDeletion(t *testing.T, fixture Fixture) {
	box := new(eventCollector)
	storage := entity.WithStorage(entities.Storage{Documents: fixture.Docs, Deleted: fixture.Gone, Append: box.Append})
	recorded, err := entity.NewRecorded(nil, nil, "thing", func(thing *thing) *string { return &thing.ID }, storage, entity.WithChunk(2))
	if err != nil {
		t.Fatal(err)
	}

	fixture.runTransaction(t, func(ctx context.Context) error {
		box.events = nil
		_, err := recorded.StoreMany(ctx, thing{"a", "1"}, thing{"b", "1"}, thing{"c", "1"})
		return err
	})

	fixture.runTransaction(t, func(ctx context.Context) error {
		_, err := recorded.Update(ctx, thing{"a", "2"})
		_, err2 := recorded.DeleteMany(ctx, "b", "c", "d")
		return errors.Join(err, err2)
	})

	fixture.runTransaction(t, func(ctx context.Context) error {
		version, err := recorded.Insert(ctx, thing{"b", "3"})
		if version != 3 {
			t.Errorf("got version %d after a deletion, want 3", version)
		}

		return err
	})

	fixture.checkDocuments(t, fixture.Docs,
		thingDoc("a", "2", 2), thingDoc("b", "3", 3))
	fixture.runTransaction(t, func(ctx context.Context) error {
		n, err := recorded.DeleteAll(ctx)
		if n != 2 {
			t.Errorf("DeleteAll deleted %d entities, want 2", n)
		}

		return err
	})

	fixture.checkDocuments(t, fixture.Docs)
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

func viewGoesForward(t *testing.T, fixture Fixture) {
	id := idValues("a")[0]
	state := func(version int64) entities.State {
		return entities.State{ID: id, Version: version, Doc: newDoc("a", version, "x")}
	}
	gone := func(version int64) entities.State { return entities.State{ID: id, Version: version} }
	for _, step := range []struct {
		state entities.State
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
		other := entities.State{ID: idValues("b")[0], Version: 1, Doc: newDoc("b", 1, "another entity")}
		if err := fixture.View.Apply(t.Context(), []entities.State{step.state, other}); err != nil {
			t.Fatal(err)
		}

		fixture.checkView(t, append(step.want, other.Doc)...)
	}

	if err := fixture.View.Apply(t.Context(), nil); err != nil {
		t.Errorf("nothing to apply: %v", err)
	}
}

func viewRollback(t *testing.T, fixture Fixture) {
	no := errors.New("no")
	states := []entities.State{{ID: idValues("a")[0], Version: 1, Doc: newDoc("a", 1, "x")}, {ID: idValues("b")[0], Version: 2}}
	err := fixture.Docs.Transaction(t.Context(), func(ctx context.Context) error {
		return errors.Join(fixture.View.Apply(ctx, states), no)
	})
	if !errors.Is(err, no) {
		t.Error(err)
	}

	fixture.checkView(t)
	// The deletion was rolled back too, so version 1 is not too old.
	state := entities.State{ID: idValues("b")[0], Version: 1, Doc: newDoc("b", 1, "x")}
	if err := fixture.View.Apply(t.Context(), []entities.State{state}); err != nil {
		t.Fatal(err)
	}

	fixture.checkView(t, state.Doc)
}
