package changestream

import (
	"testing"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/changes"
)

// A stream passes over an event that the server cannot send, if an operator has ordered it: the server leaves it out before. A
// later event with the id of an order is read.
func TestN24_AnEventIsLeftOutByOrder(t *testing.T) {
	t.Parallel()
	b := newFixture(t)
	coll := b.db.Collection("outbox")
	at := b.clusterTime()
	const fat = "fat"
	b.insertIDs(coll, "a")
	if _, err := coll.InsertOne(t.Context(), oversizeDocument(t, fat)); err != nil {
		t.Fatal(err)
	}
	order := b.clusterTime()
	b.insertIDs(coll, "b", "c")

	for _, id := range []string{"a", fat, "c"} {
		typ, value, err := bson.MarshalValue(id)
		if err != nil {
			t.Fatal(err)
		}
		b.skip = append(b.skip, changes.Skip{DB: b.db.Name(), Coll: "outbox", ID: bson.RawValue{Type: typ, Value: value}, Until: order})
	}
	for _, watch := range []string{b.db.Name() + ".outbox", b.db.Name() + ".*"} {
		r := b.startReader(scopeOf(t, watch), changes.Start{At: &at})
		r.wantIDs("b", "c")
		r.withLock(func() {
			if len(r.counts) > 0 {
				t.Errorf("%s: reopened: %v", watch, r.counts)
			}
		})
	}
}
