package outboxes_test

import (
	"errors"
	"maps"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/outboxes"
)

func TestEnsureIndexes(t *testing.T) {
	t.Parallel()
	coll := database(t).Collection("outbox")
	if missing, err := outboxes.MissingIndexes(t.Context(), coll); err != nil || len(missing) != len(outboxes.Indexes()) {
		t.Fatalf("a collection that is not there misses %d, %v", len(missing), err)
	}

	// One index was created by hand, under another name and with another number type.
	if _, err := coll.Indexes().CreateOne(t.Context(), mongo.IndexModel{Keys: bson.D{{Key: "ts", Value: 1.0}}, Options: options.Index().SetName("mine")}); err != nil {
		t.Fatal(err)
	}

	// The second time, there is nothing to do.
	for range 2 {
		if err := outboxes.EnsureIndexes(t.Context(), coll); err != nil {
			t.Fatal(err)
		}
		if missing, err := outboxes.MissingIndexes(t.Context(), coll); err != nil || len(missing) != 0 {
			t.Fatalf("%v are missing, %v", missing, err)
		}
	}

	// A healthy envelope is in one of them only.
	if _, err := coll.InsertMany(t.Context(), []any{bson.D{{Key: "ts", Value: bson.Timestamp{}}}, bson.D{{Key: "state", Value: "retry"}, {Key: "nextAt", Value: time.Now()}}}); err != nil {
		t.Fatal(err)
	}

	n, err := coll.CountDocuments(t.Context(), bson.D{{Key: "state", Value: bson.D{{Key: "$exists", Value: true}}}}, options.Count().SetHint("state_1_key_1_pos_1_slot_1"))
	if err != nil || n != 1 {
		t.Errorf("%d documents by the partial index, %v", n, err)
	}
}

func TestEnsureIndexesNamesADriftedOne(t *testing.T) {
	t.Parallel()
	coll := database(t).Collection("outbox")
	if _, err := coll.Indexes().CreateOne(t.Context(), mongo.IndexModel{Keys: bson.D{{Key: "ts", Value: -1}}, Options: options.Index().SetName("ts_1")}); err != nil {
		t.Fatal(err)
	}
	if err := outboxes.EnsureIndexes(t.Context(), coll); !errors.Is(err, mongodb.ErrIndexConflict) {
		t.Errorf("an index of our name over something else: %v", err)
	}
}

func TestIndexStatementsCanBeTyped(t *testing.T) {
	t.Parallel()
	got := outboxes.IndexStatements("shop", "outbox")
	want := `db.getSiblingDB("shop").getCollection("outbox").createIndex({"dueAt":1,"slot":1}, {partialFilterExpression: {"dueAt":{"$exists":true}}})`
	if len(got) != len(outboxes.Indexes()) || got[1] != want {
		t.Errorf("got %q", got)
	}
}

func TestStatementsDescribeEveryOption(t *testing.T) {
	t.Parallel()
	week := int32(604800)
	got := mongodb.Index{Name: "x", Keys: bson.D{{Key: "at", Value: int32(-1)}}, TTL: &week}.Statement("shop", "a")
	if want := `db.getSiblingDB("shop").getCollection("a").createIndex({"at":-1}, {expireAfterSeconds: 604800})`; got != want {
		t.Errorf("got %s", got)
	}
}

func TestDriftIsFoundAndRepaired(t *testing.T) {
	t.Parallel()
	coll := database(t).Collection("outbox")
	kept := int32(60)
	want := append(outboxes.Indexes(), mongodb.Index{Name: "at_1", Keys: mongodb.Ascending("at"), TTL: &kept})
	old := []mongodb.Index{{Name: "old_1", Keys: mongodb.Ascending("old")}, {Name: "theirs_1", Keys: mongodb.Ascending("ours")}}
	if err := mongodb.EnsureIndexSet(t.Context(), coll, want); err != nil {
		t.Fatal(err)
	}
	if drift, err := mongodb.CompareIndexes(t.Context(), coll, want, old); err != nil || len(drift) != 0 {
		t.Fatalf("just made: %+v, %v", drift, err)
	}

	// One is dropped, one has other options, one a partial filter that leaves documents out; one is of an older version,
	// one has that version's name over keys of somebody else, and one only the relay can have made.
	for _, name := range []string{"dueAt_1_slot_1", "nextAt_1_slot_1", "at_1"} {
		if err := coll.Indexes().DropOne(t.Context(), name); err != nil {
			t.Fatal(err)
		}
	}

	for _, m := range []mongo.IndexModel{
		{Keys: bson.D{{Key: "nextAt", Value: 1}, {Key: "slot", Value: 1}}, Options: options.Index().SetName("nextAt_1_slot_1").SetSparse(true)},
		{Keys: bson.D{{Key: "at", Value: 1}}, Options: options.Index().SetName("at_1").SetExpireAfterSeconds(61)},
		{Keys: bson.D{{Key: "old", Value: 1}}, Options: options.Index().SetName("old_1")},
		{Keys: bson.D{{Key: "theirs", Value: 1}}, Options: options.Index().SetName("theirs_1")},
		{Keys: bson.D{{Key: "z", Value: 1}}, Options: options.Index().SetName(mongodb.OwnPrefix + "z")},
	} {
		if _, err := coll.Indexes().CreateOne(t.Context(), m); err != nil {
			t.Fatal(err)
		}
	}

	drift, err := mongodb.CompareIndexes(t.Context(), coll, want, old)
	if err != nil {
		t.Fatal(err)
	}

	found := map[string]mongodb.DriftKind{}
	for _, d := range drift {
		found[d.Index.Name] = d.Kind
	}

	expected := map[string]mongodb.DriftKind{"dueAt_1_slot_1": mongodb.IndexMissing, "nextAt_1_slot_1": mongodb.IndexDifferent, "at_1": mongodb.IndexDifferent, "old_1": mongodb.IndexSuperfluous, mongodb.OwnPrefix + "z": mongodb.IndexSuperfluous}
	if !maps.Equal(found, expected) {
		t.Fatalf("found %v, want %v", found, expected)
	}

	for range 2 { // mending may be repeated
		for _, d := range drift {
			if err := mongodb.RepairIndex(t.Context(), coll.Database().Client(), d); err != nil {
				t.Fatal(err)
			}
		}
	}
	if drift, err := mongodb.CompareIndexes(t.Context(), coll, want, old); err != nil || len(drift) != 0 {
		t.Errorf("after the repair: %+v, %v", drift, err)
	}
	if gone, err := mongodb.DropIndex(t.Context(), coll, old[1]); err != nil || gone {
		t.Errorf("an index of the same name over other keys was dropped: %v, %v", gone, err)
	}
	if gone, err := mongodb.DropIndex(t.Context(), coll, outboxes.Indexes()[0]); err != nil || !gone {
		t.Errorf("dropping: %v, %v", gone, err)
	}
}
