package outboxes_test

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/relay/stored/outboxes"
)

var both = outboxes.Indexes{Purge: true, Scheduled: true}

// makeOutbox creates a collection and returns it with its UUID.
func makeOutbox(t *testing.T, opts ...options.Lister[options.CreateCollectionOptions]) (*mongo.Collection, outboxes.Outbox) {
	t.Helper()
	db := database(t)
	if err := db.CreateCollection(t.Context(), "outbox", opts...); err != nil {
		t.Fatal(err)
	}
	uuid, err := mongodb.CollectionUUID(t.Context(), db.Client(), db.Name(), "outbox")
	if err != nil {
		t.Fatal(err)
	}
	return db.Collection("outbox"), outboxes.Outbox{DB: db.Name(), Coll: "outbox", UUID: uuid}
}

func TestIndexesAreCreatedOnce(t *testing.T) {
	t.Parallel()
	coll, o := makeOutbox(t)
	// One index was created by hand, under another name and with another number type.
	if _, err := coll.Indexes().CreateOne(t.Context(), mongo.IndexModel{Keys: bson.D{{Key: "ts", Value: 1.0}}, Options: options.Index().SetName("mine")}); err != nil {
		t.Fatal(err)
	}
	if created, err := both.Ensure(t.Context(), coll.Database().Client(), o); err != nil || len(created) != 1 {
		t.Fatalf("%q, %v", created, err)
	}
	if created, err := both.Ensure(t.Context(), coll.Database().Client(), o); err != nil || len(created) != 0 {
		t.Fatalf("the second time: %q, %v", created, err)
	}
	if missing, err := both.Missing(t.Context(), coll); err != nil || len(missing) != 0 {
		t.Errorf("%v, %v", missing, err)
	}

	// Nothing is wanted where the relay neither purges nor finds scheduled envelopes.
	if created, err := (outboxes.Indexes{}).Ensure(t.Context(), coll.Database().Client(), o); err != nil || len(created) != 0 {
		t.Errorf("%q, %v", created, err)
	}
}

// A database that was dropped would exist again, with an empty outbox that nobody removes.
func TestAnIndexDoesNotBringADroppedDatabaseBack(t *testing.T) {
	t.Parallel()
	coll, o := makeOutbox(t)
	db := coll.Database()
	if err := db.Drop(t.Context()); err != nil {
		t.Fatal(err)
	}

	if _, err := both.Ensure(t.Context(), db.Client(), o); !errors.Is(err, mongodb.ErrCollectionGone) {
		t.Errorf("%v", err)
	}
	if _, err := outboxes.EnsureSentTTL(t.Context(), db.Client(), o, time.Hour); !errors.Is(err, mongodb.ErrCollectionGone) {
		t.Errorf("%v", err)
	}
	names, err := db.Client().ListDatabaseNames(t.Context(), bson.D{{Key: "name", Value: db.Name()}})
	if err != nil || len(names) != 0 {
		t.Errorf("the databases are %v, %v", names, err)
	}
}

// An index inherits the collation of the collection, and serves all the same: its keys are times and numbers.
func TestACollationOfTheCollectionDoesNotMatter(t *testing.T) {
	t.Parallel()
	coll, o := makeOutbox(t, options.CreateCollection().SetCollation(&options.Collation{Locale: "en", NumericOrdering: true}))
	if created, err := both.Ensure(t.Context(), coll.Database().Client(), o); err != nil || len(created) != 2 {
		t.Fatalf("%q, %v", created, err)
	}
	if missing, err := both.Missing(t.Context(), coll); err != nil || len(missing) != 0 {
		t.Errorf("%v, %v", missing, err)
	}
}

func TestAnIndexOfOthersIsAConflict(t *testing.T) {
	t.Parallel()
	coll, o := makeOutbox(t)
	if _, err := coll.Indexes().CreateOne(t.Context(), mongo.IndexModel{Keys: bson.D{{Key: "ts", Value: -1}}, Options: options.Index().SetName("ts_1")}); err != nil {
		t.Fatal(err)
	}
	if _, err := both.Ensure(t.Context(), coll.Database().Client(), o); !errors.Is(err, mongodb.ErrIndexConflict) {
		t.Errorf("an index of our name over something else: %v", err)
	}
}

func TestStatementsDescribeEveryOption(t *testing.T) {
	t.Parallel()
	week := int32(604800)
	got := mongodb.Index{Name: "x", Keys: bson.D{{Key: "at", Value: int32(-1)}}, TTL: &week}.Statement("shop", "a")
	if want := `db.getSiblingDB("shop").getCollection("a").createIndex({"at":-1}, {expireAfterSeconds: 604800})`; got != want {
		t.Errorf("got %s", got)
	}
	got = both.List()[1].Statement("shop", "outbox")
	if want := `db.getSiblingDB("shop").getCollection("outbox").createIndex({"dueAt":1,"slot":1}, {partialFilterExpression: {"dueAt":{"$exists":true}}})`; got != want {
		t.Errorf("got %s", got)
	}
}

// An index of a service that conflicts with one index of the relay does not prevent another one.
func TestAConflictPreventsNoOtherIndex(t *testing.T) {
	t.Parallel()
	coll, o := makeOutbox(t)
	expiring := mongo.IndexModel{Keys: bson.D{{Key: "ts", Value: 1}}, Options: options.Index().SetName("ts_1").SetExpireAfterSeconds(60)}
	if _, err := coll.Indexes().CreateOne(t.Context(), expiring); err != nil {
		t.Fatal(err)
	}

	created, err := both.Ensure(t.Context(), coll.Database().Client(), o)
	if !errors.Is(err, mongodb.ErrIndexConflict) || len(created) != 1 {
		t.Errorf("created %q, %v; want one index and %v", created, err, mongodb.ErrIndexConflict)
	}
	if missing, err := both.Missing(t.Context(), coll); err != nil || len(missing) != 1 || missing[0].Name != "ts_1" {
		t.Errorf("missing are %v, %v; want ts_1", missing, err)
	}
}

// A conflict of one index does not hide that another attempt may create the other.
func TestAConflictHidesNoOtherError(t *testing.T) {
	t.Parallel()
	coll, o := makeOutbox(t)
	// With that of _id, a collection has at most 64 indexes.
	models := []mongo.IndexModel{{Keys: bson.D{{Key: "ts", Value: 1}}, Options: options.Index().SetName("ts_1").SetExpireAfterSeconds(60)}}
	for i := range 62 {
		models = append(models, mongo.IndexModel{Keys: bson.D{{Key: fmt.Sprint("field", i), Value: 1}}})
	}
	if _, err := coll.Indexes().CreateMany(t.Context(), models); err != nil {
		t.Fatal(err)
	}

	client := coll.Database().Client()
	if created, err := both.Ensure(t.Context(), client, o); err == nil || errors.Is(err, mongodb.ErrIndexConflict) || len(created) > 0 {
		t.Errorf("created %q, %v; want the error of the other index", created, err)
	}
	if err := coll.Indexes().DropOne(t.Context(), "field0_1"); err != nil {
		t.Fatal(err)
	}
	if created, err := both.Ensure(t.Context(), client, o); !errors.Is(err, mongodb.ErrIndexConflict) || len(created) != 1 {
		t.Errorf("created %q, %v; want one index and %v", created, err, mongodb.ErrIndexConflict)
	}
}
