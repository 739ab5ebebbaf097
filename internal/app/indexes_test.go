package app_test

import (
	"slices"
	"testing"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/store"
)

func (b *bundle) indexesOf(coll *mongo.Collection) (names []string) {
	b.t.Helper()
	specs, err := coll.Indexes().ListSpecifications(b.t.Context())
	if err != nil {
		b.t.Fatal(err)
	}
	for _, s := range specs {
		names = append(names, s.Name)
	}
	return names
}

// TestIndexesAreMadeAtTheStart: those that are declared, and the one that the configuration asks for.
func TestIndexesAreMadeAtTheStart(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.append(1)
	b.start("recording=mark", "purge.ttl=2h")
	box := b.db.Collection("outbox")
	waitFor(t, func() bool { return slices.Contains(b.indexesOf(box), store.SentIndexName) })
	have := b.indexesOf(box)
	for _, want := range store.Indexes() {
		if !slices.Contains(have, want.Name) {
			t.Errorf("%s is missing; there are %v", want.Name, have)
		}
	}
	if n, err := b.state.Collection("migrations").CountDocuments(t.Context(), bson.D{{Key: "_id", Value: bson.D{{Key: "$regex", Value: "^[0-9]{4}$"}}}}); err != nil || n == 0 {
		t.Errorf("%d entries in the ledger, %v", n, err)
	}
}

// TestNoIndexIsMadeIfSwitchedOff: the relay works without any, and leaves all as it is.
func TestNoIndexIsMadeIfSwitchedOff(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.append(2)
	stop := b.start("mongodb.indexes=false")
	b.consume(2)
	if err := stop(); err != nil { // a stop waits for what works beside the delivery
		t.Fatal(err)
	}
	if have := b.indexesOf(b.db.Collection("outbox")); len(have) != 1 {
		t.Errorf("indexes were made: %v", have)
	}
	if n, err := b.state.Collection("migrations").CountDocuments(t.Context(), bson.D{}); err != nil || n != 0 {
		t.Errorf("%d entries in the ledger, %v", n, err)
	}
}
