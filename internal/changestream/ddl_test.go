package changestream

import (
	"errors"
	"slices"
	"strings"
	"testing"

	"go.mongodb.org/mongo-driver/v2/bson"
)

func (r *reader) ops() []Op {
	ops := make([]Op, len(r.events))
	for i, e := range r.events {
		ops[i] = e.op
	}
	return ops
}

func (b *bundle) rename(from, to string, dropTarget bool) {
	b.t.Helper()
	err := b.admin.Database("admin").RunCommand(b.t.Context(), bson.D{
		{Key: "renameCollection", Value: b.db.Name() + "." + from},
		{Key: "to", Value: b.db.Name() + "." + to},
		{Key: "dropTarget", Value: dropTarget},
	}).Err()
	if err != nil {
		b.t.Fatal(err)
	}
}

func TestN27_TheEndOfACollectionEndsItsStream(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name string
		op   Op
		do   func(b *bundle) error
	}{
		{"drop", Drop, func(b *bundle) error { return b.db.Collection("outbox").Drop(b.t.Context()) }},
		{"dropDatabase", Drop, func(b *bundle) error { return b.db.Drop(b.t.Context()) }}, // drops its collections first
		{"rename", Rename, func(b *bundle) error { b.rename("outbox", "old", false); return nil }},
		{"replaced", Rename, func(b *bundle) error {
			b.insert(b.db.Collection("other"), "x")
			b.rename("other", "outbox", true)
			return nil
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			b := setup(t)
			coll := b.db.Collection("outbox")
			at := b.now()
			b.insert(coll, "a", "b")
			scope := scopeOf(t, b.db.Name()+".outbox")
			r := b.read(scope, Start{At: &at})
			r.wantIDs("a", "b")
			if err := c.do(b); err != nil {
				t.Fatal(err)
			}
			var end *InvalidateError
			if err := r.end(); !errors.As(err, &end) {
				t.Fatalf("Run ended with %v", err)
			}
			if end.Op != c.op || end.NS != scope.String() || end.Position.Token.IsZero() {
				t.Errorf("%+v", end)
			}
			if ops := r.ops(); !slices.Equal(ops, []Op{Insert, Insert, c.op, Invalidate}) {
				t.Errorf("events %v", ops)
			}
			// The position that was handed on is still in front of the end: starting there again says it again.
			if r.pos.Compare(end.Position) >= 0 {
				t.Error("a batch carried the position of the invalidate event")
			}
			again := b.read(scope, Start{Position: r.pos}, func(c *Config) { c.BatchSize = 1 })
			if err := again.end(); !errors.As(err, &end) || again.pos.Compare(end.Position) >= 0 {
				t.Errorf("from the last position: %v, at %s", err, again.pos.Token)
			}
			// Starting behind it goes on with the collection that is made anew.
			b.insert(coll, "new")
			next := b.read(scope, Start{Position: end.Position})
			next.until("the new collection's event", func() bool { return slices.Contains(next.ids(), "new") })
		})
	}
}

func TestN27_WiderStreamsGoOn(t *testing.T) {
	t.Parallel()
	b := setup(t)
	names := []string{b.db.Name() + ".outbox", b.db.Name() + ".second"}
	at := b.now()
	b.insert(b.db.Collection("outbox"), "a")
	b.insert(b.db.Collection("second"), "b")
	db := b.read(scopeOf(t, names...), Start{At: &at})
	cluster := b.read(scopeOf(t, b.db.Name()+"*.outbox", b.db.Name()+"*.second"), Start{At: &at})
	for _, r := range []*reader{db, cluster} {
		r.until("a and b", func() bool { return len(r.ids()) == 2 })
	}
	if err := b.db.Collection("outbox").Drop(t.Context()); err != nil {
		t.Fatal(err)
	}
	b.insert(b.db.Collection("fill"), "x")
	b.rename("fill", "outbox", false) // into the scope
	b.rename("second", "aside", false)
	b.insert(b.db.Collection("outbox"), "c")
	b.insert(b.db.Collection("aside"), "unseen")
	for _, r := range []*reader{db, cluster} {
		r.until("c", func() bool { return slices.Contains(r.ids(), "c") })
		if ops := r.ops(); !slices.Equal(ops, []Op{Insert, Insert, Drop, Rename, Rename, Insert}) {
			t.Errorf("%s: events %v", r.stream.cfg.Scope, ops)
		}
	}
	if err := b.db.Drop(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := db.end(); err == nil || !strings.Contains(err.Error(), "dropped") {
		t.Errorf("the database stream ended with %v", err)
	}
	cluster.until("dropDatabase", func() bool { return slices.Contains(cluster.ops(), DropDatabase) })
	b.insert(b.db.Collection("outbox"), "again")
	cluster.until("again", func() bool { return slices.Contains(cluster.ids(), "again") })
}
