package state_test

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"testing"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
	"go.uber.org/goleak"

	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/relay/stored/state"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(stacktest.Settled(m, goleak.Find)) }

var discard = slog.New(slog.DiscardHandler)

// newDatabase returns an empty database, and the state database in it.
func newDatabase(t *testing.T) (*mongo.Database, state.Database) {
	t.Helper()
	db := stacktest.Database(t, stacktest.Client(t))
	return db, state.Of(db)
}

func mustEnsure(t *testing.T, d state.Database) {
	t.Helper()
	if err := d.Ensure(t.Context(), discard); err != nil {
		t.Fatal(err)
	}
}

// insertOne makes a collection with one document.
func insertOne(t *testing.T, coll *mongo.Collection) {
	t.Helper()
	if _, err := coll.InsertOne(t.Context(), bson.D{{Key: "mine", Value: true}}); err != nil {
		t.Fatal(err)
	}
}

// expectUnusable expects that Check and Ensure reject d with each of the texts, and that Ensure leaves the collections of db as they are.
func expectUnusable(t *testing.T, db *mongo.Database, d state.Database, texts ...string) {
	t.Helper()
	before, err := db.ListCollectionNames(t.Context(), bson.D{})
	if err != nil {
		t.Fatal(err)
	}
	for _, err := range []error{d.Check(t.Context()), d.Ensure(t.Context(), discard)} {
		if !errors.Is(err, state.ErrUnusable) {
			t.Fatalf("%v", err)
		}
		for _, text := range texts {
			if !strings.Contains(err.Error(), text) {
				t.Errorf("%v, want %s", err, text)
			}
		}
	}

	after, err := db.ListCollectionNames(t.Context(), bson.D{})
	if slices.Sort(before); err != nil {
		t.Fatal(err)
	}
	if slices.Sort(after); !slices.Equal(before, after) {
		t.Errorf("the collections were %v and are %v", before, after)
	}
}

func TestTheFirstStartCreatesEveryCollection(t *testing.T) {
	t.Parallel()
	db, d := newDatabase(t)
	insertOne(t, db.Collection("orders"))
	if err := d.Check(t.Context()); err != nil {
		t.Errorf("an application's database: %v", err)
	}
	mustEnsure(t, d)

	names, err := db.ListCollectionNames(t.Context(), bson.D{{Key: "name", Value: bson.D{{Key: "$ne", Value: "orders"}}}})
	if err != nil {
		t.Fatal(err)
	}
	want := d.Names()
	if slices.Sort(names); !slices.Equal(names, slices.Sorted(slices.Values(want))) {
		t.Errorf("%v, want %v", names, want)
	}
	for _, c := range state.Table() {
		if missing, err := mongodb.MissingIndexes(t.Context(), d.Collection(c.Name), c.Indexes); err != nil || len(missing) > 0 {
			t.Errorf("%s lacks %v, %v", c.Name, missing, err)
		}
	}

	// A later start changes nothing.
	mustEnsure(t, d)
	if err := d.Check(t.Context()); err != nil {
		t.Error(err)
	}
}

func TestTwoFirstStartsAtTheSameTime(t *testing.T) {
	t.Parallel()
	_, d := newDatabase(t)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var starts sync.WaitGroup
	for range 8 {
		starts.Go(func() {
			if err := d.Ensure(ctx, discard); err != nil {
				t.Error(err)
			}
		})
	}
	starts.Wait()
	if err := d.Check(t.Context()); err != nil {
		t.Error(err)
	}
}

// A collection of somebody else with a name of outrelay is neither used nor given an index. Its documents would otherwise
// expire by the index of the audit log.
func TestACollectionOfOthersIsRejected(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"audit", "marker", "watchers"} {
		db, d := newDatabase(t)
		insertOne(t, d.Collection(name))
		if name == "marker" {
			if err := d.Ensure(t.Context(), discard); !errors.Is(err, state.ErrUnusable) {
				t.Errorf("marker: %v", err)
			}
			continue
		}
		expectUnusable(t, db, d, d.Namespace(name), "state.prefix", "state.database")
	}
}

// A newer version needs a collection whose name others took while the older version ran.
func TestANameThatOthersTookIsRejected(t *testing.T) {
	t.Parallel()
	db, d := newDatabase(t)
	mustEnsure(t, d)
	remove := bson.D{{Key: "$pull", Value: bson.D{{Key: "collections", Value: "replays"}}}}
	if _, err := d.Collection("marker").UpdateOne(t.Context(), bson.D{}, remove); err != nil {
		t.Fatal(err)
	}
	expectUnusable(t, db, d, d.Namespace("replays"))
}

func TestAnotherFormatIsRejected(t *testing.T) {
	t.Parallel()
	db, d := newDatabase(t)
	mustEnsure(t, d)
	if _, err := d.Collection("marker").UpdateOne(t.Context(), bson.D{}, bson.D{{Key: "$set", Value: bson.D{{Key: "format", Value: 2}}}}); err != nil {
		t.Fatal(err)
	}
	expectUnusable(t, db, d, d.Namespace("marker"), "format 2")
}

// A start creates what an earlier one has not.
func TestAnInterruptedFirstStartIsContinued(t *testing.T) {
	t.Parallel()
	_, d := newDatabase(t)
	mustEnsure(t, d)
	for _, name := range []string{"audit", "imports"} {
		if err := d.Collection(name).Drop(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	mustEnsure(t, d)
	if missing, err := mongodb.MissingIndexes(t.Context(), d.Collection("audit"), state.Table()[4].Indexes); err != nil || len(missing) > 0 {
		t.Errorf("%v, %v", missing, err)
	}
}

// A default collation of a collection would compare positions as words.
func TestTheCollationIsSimple(t *testing.T) {
	t.Parallel()
	db, d := newDatabase(t)
	mustEnsure(t, d)
	specs, err := db.ListCollectionSpecifications(t.Context(), bson.D{}, options.ListCollections())
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range specs {
		if _, err := s.Options.LookupErr("collation"); err == nil {
			t.Errorf("%s has a collation: %v", s.Name, s.Options)
		}
	}
}
