package changestream

import (
	"errors"
	"slices"
	"strings"
	"testing"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/relay/changes"
)

func (r *reader) eventOps() []changes.Op {
	ops := make([]changes.Op, len(r.events))
	for i, e := range r.events {
		ops[i] = e.op
	}
	return ops
}

func (b *fixture) renameCollection(from, to string, dropTarget bool) {
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
		op   changes.Op
		do   func(b *fixture) error
	}{
		{"drop", changes.Drop, func(b *fixture) error { return b.db.Collection("outbox").Drop(b.t.Context()) }},
		// The server drops the collections of the database first.
		{"dropDatabase", changes.Drop, func(b *fixture) error { return b.db.Drop(b.t.Context()) }},
		{"rename", changes.Rename, func(b *fixture) error { b.renameCollection("outbox", "old", false); return nil }},
		{"replaced", changes.Rename, func(b *fixture) error {
			b.insertIDs(b.db.Collection("other"), "x")
			b.renameCollection("other", "outbox", true)
			return nil
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			b := newFixture(t)
			coll := b.db.Collection("outbox")
			at := b.clusterTime()
			b.insertIDs(coll, "a", "b")
			scope := scopeOf(t, b.db.Name()+".outbox")
			r := b.startReader(scope, changes.Start{At: &at})
			r.wantIDs("a", "b")
			if err := c.do(b); err != nil {
				t.Fatal(err)
			}

			var end *changes.InvalidateError
			if err := r.waitForEnd(); !errors.As(err, &end) {
				t.Fatalf("Run returned %v, want an InvalidateError", err)
			}
			if end.Op != c.op || end.NS != scope.String() || end.Position.Token.IsZero() {
				t.Errorf("InvalidateError %+v, want op %s, ns %s and a position", end, c.op, scope)
			}
			if ops := r.eventOps(); !slices.Equal(ops, []changes.Op{changes.Insert, changes.Insert, c.op, changes.Invalidate}) {
				t.Errorf("events %v, want [insert insert %s invalidate]", ops, c.op)
			}

			// The last position of a batch is before the end, so a start there reports the end again.
			if r.pos.Compare(end.Position) >= 0 {
				t.Error("a batch carried the position of the invalidate event")
			}

			again := b.startReader(scope, changes.Start{Position: r.pos}, func(p *pace) { p.batchSize = 1 })
			if err := again.waitForEnd(); !errors.As(err, &end) || again.pos.Compare(end.Position) >= 0 {
				t.Errorf("Run from the last position returned %v at %s, want an InvalidateError before %s",
					err, again.pos.Token, end.Position.Token)
			}

			// A start after the end continues with a new collection of the same name.
			b.insertIDs(coll, "new")
			next := b.startReader(scope, changes.Start{Position: end.Position})
			next.waitUntil("the new collection's event", func() bool { return slices.Contains(next.insertedIDs(), "new") })
		})
	}
}

func TestN27_WiderStreamsGoOn(t *testing.T) {
	t.Parallel()
	b := newFixture(t)
	names := []string{b.db.Name() + ".outbox", b.db.Name() + ".second"}
	at := b.clusterTime()
	b.insertIDs(b.db.Collection("outbox"), "a")
	b.insertIDs(b.db.Collection("second"), "b")
	db := b.startReader(scopeOf(t, names...), changes.Start{At: &at})
	cluster := b.startReader(scopeOf(t, b.db.Name()+"*.outbox", b.db.Name()+"*.second"), changes.Start{At: &at})

	for _, r := range []*reader{db, cluster} {
		r.waitUntil("a and b", func() bool { return len(r.insertedIDs()) == 2 })
	}

	if err := b.db.Collection("outbox").Drop(t.Context()); err != nil {
		t.Fatal(err)
	}
	b.insertIDs(b.db.Collection("fill"), "x")

	// Rename a collection into the scope, and another one out of it.
	b.renameCollection("fill", "outbox", false)
	b.renameCollection("second", "aside", false)
	b.insertIDs(b.db.Collection("outbox"), "c")
	b.insertIDs(b.db.Collection("aside"), "unseen")

	for _, r := range []*reader{db, cluster} {
		r.waitUntil("c", func() bool { return slices.Contains(r.insertedIDs(), "c") })
		if ops := r.eventOps(); !slices.Equal(ops, []changes.Op{changes.Insert, changes.Insert, changes.Drop, changes.Rename, changes.Rename, changes.Insert}) {
			t.Errorf("%s: events %v, want [insert insert drop rename rename insert]", r.stream.cfg.Scope, ops)
		}
	}

	if err := b.db.Drop(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := db.waitForEnd(); err == nil || !strings.Contains(err.Error(), "dropped") {
		t.Errorf("Run of the database stream returned %v, want an error with \"dropped\"", err)
	}

	cluster.waitUntil("dropDatabase", func() bool { return slices.Contains(cluster.eventOps(), changes.DropDatabase) })
	b.insertIDs(b.db.Collection("outbox"), "again")
	cluster.waitUntil("again", func() bool { return slices.Contains(cluster.insertedIDs(), "again") })
}
