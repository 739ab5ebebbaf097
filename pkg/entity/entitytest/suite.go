// Package entitytest is the contract of entity.Documents and entity.View as tests: whatever entities are kept in passes
// them. Each case takes a Fixture of its own.
package entitytest

import (
	"bytes"
	"context"
	"errors"
	"slices"
	"testing"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/pkg/entity"
	"github.com/outrelay/outrelay/pkg/event"
	"github.com/outrelay/outrelay/pkg/outbox"
)

// Fixture is an empty store.
type Fixture struct {
	Docs, Gone entity.Documents // of one transaction
	Plain      entity.Documents // those of Docs, without need of a transaction
	View       entity.View      // its documents have their version in the field "version"
	// Viewed are the documents of View that are there, in any order.
	Viewed func(ctx context.Context) ([]bson.Raw, error)
}

// Run runs the suite. factory makes a new Fixture for each case; what it starts it ends by t.Cleanup.
func Run(t *testing.T, factory func(t *testing.T) Fixture) {
	for _, c := range []struct {
		name string
		test func(*testing.T, Fixture)
	}{
		{"a transaction is required", transactionIsRequired},
		{"what is found", finding},
		{"pages", pages},
		{"an insert is of new documents", inserts},
		{"puts and replacements", replacements},
		{"guards", guards},
		{"a rollback leaves nothing", rollback},
		{"versions go on through deletion", versions},
		{"a view goes only forward", forward},
		{"a view rolls back", viewRollback},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			c.test(t, factory(t))
		})
	}
}

func doc(id any, version int64, text string) bson.Raw {
	d := bson.D{{Key: "_id", Value: id}}
	if version > 0 {
		d = append(d, bson.E{Key: "version", Value: version})
	}
	raw, err := bson.Marshal(append(d, bson.E{Key: "text", Value: text}))
	if err != nil {
		panic(err) // the values are constants of this package
	}
	return raw
}

func ids(values ...any) []bson.RawValue {
	list := make([]bson.RawValue, len(values))
	for i, v := range values {
		list[i] = doc(v, 0, "").Lookup("_id")
	}
	return list
}

// do runs fn in a transaction that must commit.
func (f Fixture) do(t *testing.T, fn func(ctx context.Context) error) {
	t.Helper()
	if err := f.Docs.Transaction(t.Context(), fn); err != nil {
		t.Fatal(err)
	}
}

// want compares the documents of d, whatever their order.
func (f Fixture) want(t *testing.T, d entity.Documents, docs ...bson.Raw) {
	t.Helper()
	f.do(t, func(ctx context.Context) error {
		got, err := d.Scan(ctx, bson.RawValue{}, 100)
		same(t, d.Name(), got, docs)
		return err
	})
}

func same(t *testing.T, what string, got, want []bson.Raw) {
	t.Helper()
	got, want = slices.Clone(got), slices.Clone(want)
	for _, list := range [][]bson.Raw{got, want} {
		slices.SortFunc(list, func(a, b bson.Raw) int { return bytes.Compare(a, b) })
	}
	if !slices.EqualFunc(got, want, func(a, b bson.Raw) bool { return bytes.Equal(a, b) }) {
		t.Errorf("in %s: %v, want %v", what, got, want)
	}
}

func transactionIsRequired(t *testing.T, f Fixture) {
	ctx := t.Context()
	a := doc("a", 1, "")
	calls := func(ctx context.Context, d entity.Documents) map[string]error {
		_, find := d.Find(ctx, ids("a"))
		_, scan := d.Scan(ctx, bson.RawValue{}, 1)
		_, replace := d.Replace(ctx, a, nil)
		_, remove := d.Delete(ctx, ids("a"), nil)
		return map[string]error{"Find": find, "Scan": scan, "Replace": replace, "Delete": remove, "Put": d.Put(ctx, []bson.Raw{a})}
	}
	for name, err := range calls(ctx, f.Docs) {
		if !errors.Is(err, outbox.ErrNoTransaction) {
			t.Errorf("%s without a transaction: %v", name, err)
		}
	}
	if err := f.Docs.Insert(ctx, []bson.Raw{a}); !errors.Is(err, outbox.ErrNoTransaction) {
		t.Errorf("Insert without a transaction: %v", err)
	}
	f.want(t, f.Docs)
	for name, err := range calls(ctx, f.Plain) {
		if err != nil {
			t.Errorf("%s where no transaction is needed: %v", name, err)
		}
	}
	f.want(t, f.Docs, a)
}

func finding(t *testing.T, f Fixture) {
	one, text, long := doc(int32(1), 1, "int32"), doc("1", 1, "string"), doc(int64(2), 1, "int64")
	f.do(t, func(ctx context.Context) error {
		if err := f.Docs.Insert(ctx, []bson.Raw{one, text, long}); err != nil {
			return err
		}
		got, err := f.Docs.Find(ctx, ids("1", "nobody", int64(2)))
		same(t, "the transaction that wrote them", got, []bson.Raw{text, long})
		return err
	})
	f.do(t, func(ctx context.Context) error {
		got, err := f.Docs.Find(ctx, ids("1"), "version")
		if len(got) != 1 || got[0].Lookup("version").AsInt64() != 1 || got[0].Lookup("_id").StringValue() != "1" {
			t.Errorf("one field of one document: %v", got)
		}
		none, err2 := f.Docs.Find(ctx, ids("2", "nobody"))
		if len(none) != 0 {
			t.Errorf("found %v", none)
		}
		return errors.Join(err, err2)
	})
}

func pages(t *testing.T, f Fixture) {
	var all []bson.Raw
	for _, id := range []string{"c", "a", "e", "b", "d"} {
		all = append(all, doc(id, 1, id))
	}
	f.do(t, func(ctx context.Context) error { return f.Docs.Insert(ctx, all) })
	f.do(t, func(ctx context.Context) error {
		var seen []bson.Raw
		var after bson.RawValue
		for {
			page, err := f.Docs.Scan(ctx, after, 2)
			if err != nil || len(page) == 0 {
				same(t, "all pages", seen, all)
				return err
			}
			if len(page) > 2 {
				t.Errorf("a page of %d", len(page))
			}
			seen = append(seen, page...)
			after = page[len(page)-1].Lookup("_id")
		}
	})
}

func inserts(t *testing.T, f Fixture) {
	a, b := doc("a", 1, "first"), doc("b", 1, "")
	f.do(t, func(ctx context.Context) error { return f.Docs.Insert(ctx, []bson.Raw{a}) })
	err := f.Docs.Transaction(t.Context(), func(ctx context.Context) error {
		return f.Docs.Insert(ctx, []bson.Raw{b, doc("a", 1, "again")})
	})
	if !errors.Is(err, entity.ErrExists) || !errors.As(err, new(*entity.ExistsError)) {
		t.Errorf("an insert of one that is there: %v", err)
	}
	f.want(t, f.Docs, a)
}

func replacements(t *testing.T, f Fixture) {
	f.do(t, func(ctx context.Context) error {
		return f.Docs.Put(ctx, []bson.Raw{doc("a", 1, "first"), doc("b", 1, "first")})
	})
	a, b, c := doc("a", 2, "put"), doc("b", 2, "replaced"), doc("c", 1, "put")
	f.do(t, func(ctx context.Context) error {
		if err := f.Docs.Put(ctx, []bson.Raw{a, c}); err != nil {
			return err
		}
		ok, err := f.Docs.Replace(ctx, b, nil)
		none, err2 := f.Docs.Replace(ctx, doc("d", 1, ""), nil)
		if !ok || none {
			t.Errorf("replaced %v, and what is not there %v", ok, none)
		}
		return errors.Join(err, err2)
	})
	f.want(t, f.Docs, a, b, c)
	f.do(t, func(ctx context.Context) error {
		n, err := f.Docs.Delete(ctx, ids("a", "c", "d"), nil)
		if n != 2 {
			t.Errorf("%d deleted", n)
		}
		return err
	})
	f.want(t, f.Docs, b)
}

func guards(t *testing.T, f Fixture) {
	at := func(v int64) *entity.Guard { return &entity.Guard{Field: "version", Version: v} }
	f.do(t, func(ctx context.Context) error {
		return f.Docs.Put(ctx, []bson.Raw{doc("a", 3, ""), doc("old", 0, "")})
	})
	a, old := doc("a", 4, "new"), doc("old", 1, "new")
	f.do(t, func(ctx context.Context) error {
		stale, err1 := f.Docs.Replace(ctx, doc("a", 3, "stale"), at(2))
		first, err2 := f.Docs.Replace(ctx, doc("a", 1, "stale"), at(0))
		right, err3 := f.Docs.Replace(ctx, a, at(3))
		without, err4 := f.Docs.Replace(ctx, old, at(0)) // from before there were versions
		if stale || first || !right || !without {
			t.Errorf("replaced: stale %v, first %v, right %v, without a version %v", stale, first, right, without)
		}
		n, err5 := f.Docs.Delete(ctx, ids("a", "old"), at(3))
		if n != 0 {
			t.Errorf("%d deleted of another version", n)
		}
		return errors.Join(err1, err2, err3, err4, err5)
	})
	f.want(t, f.Docs, a, old)
	f.do(t, func(ctx context.Context) error {
		n, err := f.Docs.Delete(ctx, ids("a", "old"), at(4))
		if n != 1 {
			t.Errorf("%d deleted", n)
		}
		return err
	})
	f.want(t, f.Docs, old)
}

func rollback(t *testing.T, f Fixture) {
	a := doc("a", 1, "")
	f.do(t, func(ctx context.Context) error { return f.Docs.Insert(ctx, []bson.Raw{a}) })
	no := errors.New("no")
	change := func(ctx context.Context) error {
		_, err1 := f.Docs.Delete(ctx, ids("a"), nil)
		return errors.Join(err1, f.Docs.Put(ctx, []bson.Raw{doc("b", 1, "")}), f.Gone.Put(ctx, []bson.Raw{doc("a", 2, "")}))
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
	f.want(t, f.Docs, a)
	f.want(t, f.Gone)
}

type thing struct {
	ID   string `bson:"_id"`
	Text string `bson:"text"`
}

// sink is an outbox that counts.
type sink struct{ events []event.Event }

func (s *sink) Append(_ context.Context, events ...event.Event) error {
	s.events = append(s.events, events...)
	return nil
}

func versions(t *testing.T, f Fixture) {
	box := new(sink)
	r, err := entity.NewRecordedOn(f.Docs, f.Gone, box, "thing", func(t *thing) *string { return &t.ID }, entity.WithChunk(2))
	if err != nil {
		t.Fatal(err)
	}
	f.do(t, func(ctx context.Context) error {
		box.events = nil
		_, err := r.StoreMany(ctx, thing{"a", "1"}, thing{"b", "1"}, thing{"c", "1"})
		return err
	})
	f.do(t, func(ctx context.Context) error {
		_, err := r.Update(ctx, thing{"a", "2"})
		_, err2 := r.DeleteMany(ctx, "b", "c", "d")
		return errors.Join(err, err2)
	})
	f.do(t, func(ctx context.Context) error {
		v, err := r.Insert(ctx, thing{"b", "3"})
		if v != 3 {
			t.Errorf("version %d after a deletion", v)
		}
		return err
	})
	f.want(t, f.Docs,
		doc3("a", "2", 2), doc3("b", "3", 3))
	f.do(t, func(ctx context.Context) error {
		n, err := r.DeleteAll(ctx)
		if n != 2 {
			t.Errorf("%d deleted of all", n)
		}
		return err
	})
	f.want(t, f.Docs)
	if len(box.events) < 9 {
		t.Errorf("%d events", len(box.events))
	}
}

// doc3 is a thing as a Recorded stores it.
func doc3(id, text string, version int64) bson.Raw {
	raw, err := bson.Marshal(bson.D{{Key: "_id", Value: id}, {Key: "text", Value: text}, {Key: "version", Value: version}})
	if err != nil {
		panic(err) // the values are constants of this package
	}
	return raw
}

func (f Fixture) viewed(t *testing.T, want ...bson.Raw) {
	t.Helper()
	got, err := f.Viewed(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	same(t, f.View.Name(), got, want)
}

func forward(t *testing.T, f Fixture) {
	a := ids("a")[0]
	state := func(v int64) entity.State { return entity.State{ID: a, Version: v, Doc: doc("a", v, "x")} }
	gone := func(v int64) entity.State { return entity.State{ID: a, Version: v} }
	for _, step := range []struct {
		state entity.State
		want  []bson.Raw
	}{
		{state(2), []bson.Raw{doc("a", 2, "x")}},
		{state(1), []bson.Raw{doc("a", 2, "x")}},
		{state(2), []bson.Raw{doc("a", 2, "x")}},
		{gone(1), []bson.Raw{doc("a", 2, "x")}},
		{state(3), []bson.Raw{doc("a", 3, "x")}},
		{gone(5), nil},
		{state(4), nil},
		{gone(3), nil},
		{state(6), []bson.Raw{doc("a", 6, "x")}},
		{gone(5), []bson.Raw{doc("a", 6, "x")}},
		{gone(7), nil},
		{gone(7), nil},
		{state(7), nil},
	} {
		b := entity.State{ID: ids("b")[0], Version: 1, Doc: doc("b", 1, "beside it")}
		if err := f.View.Apply(t.Context(), []entity.State{step.state, b}); err != nil {
			t.Fatal(err)
		}
		f.viewed(t, append(step.want, b.Doc)...)
	}
	if err := f.View.Apply(t.Context(), nil); err != nil {
		t.Errorf("nothing to apply: %v", err)
	}
}

func viewRollback(t *testing.T, f Fixture) {
	no := errors.New("no")
	states := []entity.State{{ID: ids("a")[0], Version: 1, Doc: doc("a", 1, "x")}, {ID: ids("b")[0], Version: 2}}
	if err := f.Docs.Transaction(t.Context(), func(ctx context.Context) error { return errors.Join(f.View.Apply(ctx, states), no) }); !errors.Is(err, no) {
		t.Error(err)
	}
	f.viewed(t)
	b := entity.State{ID: ids("b")[0], Version: 1, Doc: doc("b", 1, "x")} // the deletion was rolled back too
	if err := f.View.Apply(t.Context(), []entity.State{b}); err != nil {
		t.Fatal(err)
	}
	f.viewed(t, b.Doc)
}
