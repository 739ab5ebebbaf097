package divisions

import (
	"testing"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.uber.org/goleak"

	"github.com/outrelay/outrelay/internal/contract/slot"
	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/relay/stored/state"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(stacktest.Settled(m, goleak.Find)) }

// The first process decides the number of slots. A watcher without a stored number has the number of its documents.
func TestN28_ADivisionIsAgreedOn(t *testing.T) {
	t.Parallel()
	db := state.Of(stacktest.Database(t, stacktest.Client(t)))
	d := New(db)
	two, three := slot.Range{I: 0, N: 2}, slot.Range{I: 1, N: 3}
	if err := d.Agree(t.Context(), "w", two); err != nil {
		t.Fatal(err)
	}
	if err := d.Agree(t.Context(), "w", three); err == nil {
		t.Error("three slots of a watcher of two")
	}
	if _, err := db.Collection("watchers").InsertMany(t.Context(), []any{bson.D{{Key: "_id", Value: "old/0of1"}}, bson.D{{Key: "_id", Value: "old.er/0of3"}}, bson.D{{Key: "_id", Value: "old.er/1of3"}}}); err != nil {
		t.Fatal(err)
	}
	if err := d.Agree(t.Context(), "old", two); err == nil {
		t.Error("Agree accepts two slots of a watcher whose document has one")
	}
	if err := d.Agree(t.Context(), "old", slot.Range{}); err != nil {
		t.Error(err)
	}
	if ids, err := d.IDs(t.Context(), "old.er"); err != nil || len(ids) != 2 || ids[1] != "old.er/1of3" {
		t.Errorf("%v, %v", ids, err)
	}
	if begun, err := d.Begun(t.Context(), "w", two); err != nil || begun {
		t.Errorf("begun %v, %v", begun, err)
	}
	if err := d.Begin(t.Context(), "w", two); err != nil {
		t.Fatal(err)
	}
	if begun, err := d.Begun(t.Context(), "w", two); err != nil || !begun {
		t.Errorf("begun %v, %v", begun, err)
	}

	first, err := d.StartAt(t.Context(), "w", two, bson.Timestamp{T: 7, I: 1})
	if err != nil || first.T != 7 {
		t.Errorf("%v, %v", first, err)
	}
	if again, err := d.StartAt(t.Context(), "w", slot.Range{I: 1, N: 2}, bson.Timestamp{T: 9}); err != nil || again != first {
		t.Errorf("the second slot begins at %v, %v", again, err)
	}
	if err := d.Discard(t.Context(), "old/0of1"); err != nil {
		t.Fatal(err)
	}
	if n, _ := db.Collection("watchers").CountDocuments(t.Context(), bson.D{{Key: "_id", Value: "old/0of1"}}); n != 0 {
		t.Error("an empty document stays")
	}
}
