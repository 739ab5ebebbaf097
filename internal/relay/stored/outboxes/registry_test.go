package outboxes_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/event"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
	"go.mongodb.org/mongo-driver/v2/mongo/readconcern"
	"go.mongodb.org/mongo-driver/v2/mongo/readpref"

	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/relay/stored/outboxes"
)

func TestN25_ACollectionBelongsToOneWatcher(t *testing.T) {
	t.Parallel()
	r := outboxes.NewRegistry(database(t).Collection("collections"))
	one, two := [16]byte{1}, [16]byte{2}
	if before, err := r.Register(t.Context(), one, "shop.outbox", "orders", bson.Timestamp{}); err != nil || before.Watcher != "" {
		t.Fatalf("first claim: before %+v, %v", before, err)
	}
	if before, err := r.Register(t.Context(), one, "shop.outbox2", "orders", bson.Timestamp{}); err != nil || before.Watcher != "orders" {
		t.Fatalf("again, after a rename: before %+v, %v", before, err)
	}

	_, err := r.Register(t.Context(), one, "shop.outbox2", "other", bson.Timestamp{})
	var claimed *outboxes.ClaimedError
	if !errors.As(err, &claimed) || claimed.By != "orders" {
		t.Fatalf("a second watcher: %v", err)
	}
	if _, err := r.Register(t.Context(), two, "shop.outbox2", "$other", bson.Timestamp{}); err != nil { // re-created: another collection
		t.Fatal(err)
	}
	if err := r.Release(t.Context(), one, "other"); err != nil {
		t.Fatal(err)
	}

	all, err := r.Registrations(t.Context(), "")
	if err != nil || len(all) != 2 || all[0].NS != "shop.outbox2" {
		t.Fatalf("claims: %+v, %v", all, err)
	}
	if mine, err := r.Registrations(t.Context(), "$other"); err != nil || len(mine) != 1 || mine[0].UUID.Data[0] != 2 {
		t.Fatalf("claims of one: %+v, %v", mine, err)
	}
	if err := r.Release(t.Context(), one, "orders"); err != nil {
		t.Fatal(err)
	}
	if _, err := r.Register(t.Context(), one, "shop.outbox", "other", bson.Timestamp{}); err != nil {
		t.Errorf("after the release: %v", err)
	}
	if _, err := r.Register(t.Context(), [16]byte{}, "a.b", "orders", bson.Timestamp{}); err == nil {
		t.Error("a collection without an identity was claimed")
	}
}

func TestN25_OfTwoWatchersAtOnceOneIsRejected(t *testing.T) {
	t.Parallel()
	r := outboxes.NewRegistry(database(t).Collection("collections"))
	for round := range byte(10) {
		errs := make(chan error, 4)
		for w := range 4 {
			go func() {
				_, err := r.Register(t.Context(), [16]byte{9, round}, "a.b", fmt.Sprint("w", w), bson.Timestamp{})
				errs <- err
			}()
		}

		won := 0
		for range 4 {
			if err := <-errs; err == nil {
				won++
			} else if !errors.As(err, new(*outboxes.ClaimedError)) {
				t.Error(err)
			}
		}
		if won != 1 {
			t.Errorf("%d watchers own the collection", won)
		}
	}
}

func TestListOutboxes(t *testing.T) {
	t.Parallel()
	c := stacktest.Client(t)
	a, b := stacktest.Database(t, c), stacktest.Database(t, c)
	for _, db := range []*mongo.Database{a, b} {
		for _, name := range []string{"outbox", "orders"} {
			if err := db.CreateCollection(t.Context(), name); err != nil {
				t.Fatal(err)
			}
		}
	}
	if err := a.CreateView(t.Context(), "view.outbox", "orders", mongo.Pipeline{}); err != nil {
		t.Fatal(err)
	}

	match := func(db, coll []byte) bool {
		return (string(db) == a.Name() || string(db) == b.Name()) && string(coll) != "orders"
	}

	all, err := outboxes.ListOutboxes(t.Context(), c, match)
	if err != nil || len(all) != 2 || all[0].UUID == all[1].UUID || !all[0].Identified() || all[0].NS() > all[1].NS() {
		t.Fatalf("found %+v, %v", all, err)
	}

	one, err := outboxes.ListOutboxes(t.Context(), c, match, b.Name())
	if err != nil || len(one) != 1 || one[0].DB != b.Name() || one[0].Coll != "outbox" {
		t.Fatalf("found %+v, %v", one, err)
	}

	before := one[0].UUID
	if err := b.Collection("outbox").Drop(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := b.CreateCollection(t.Context(), "outbox"); err != nil {
		t.Fatal(err)
	}
	if again, err := outboxes.ListOutboxes(t.Context(), c, match, b.Name()); err != nil || again[0].UUID == before {
		t.Errorf("a re-created collection has the identity of the old one, %v", err)
	}
}

func TestOldestTSAndEmpty(t *testing.T) {
	t.Parallel()
	coll := database(t).Collection("outbox")
	if _, ok, err := outboxes.OldestTS(t.Context(), coll); ok || err != nil {
		t.Errorf("of nothing: %v, %v", ok, err)
	}
	if exists, err := mongodb.Exists(t.Context(), coll, bson.D{}); exists || err != nil {
		t.Errorf("exists: %v, %v", exists, err)
	}

	// Unstamped ones, by an upsert and by a writer that put a date there, do not count.
	_, err := coll.UpdateOne(t.Context(), bson.D{{Key: "_id", Value: 1}}, bson.D{{Key: "$set", Value: bson.D{{Key: "ts", Value: bson.Timestamp{}}}}}, options.UpdateOne().SetUpsert(true))
	if err == nil {
		_, err = coll.InsertOne(t.Context(), bson.D{{Key: "_id", Value: 2}, {Key: "ts", Value: time.UnixMilli(1)}})
	}
	if err == nil {
		_, err = coll.InsertOne(t.Context(), bson.D{{Key: "_id", Value: 3}})
	}
	if err != nil {
		t.Fatal(err)
	}
	if _, ok, err := outboxes.OldestTS(t.Context(), coll); ok || err != nil {
		t.Errorf("of unstamped documents: %v, %v", ok, err)
	}

	for id := range 3 {
		if _, err := coll.InsertOne(t.Context(), bson.D{{Key: "_id", Value: 10 + id}, {Key: "ts", Value: bson.Timestamp{}}}); err != nil {
			t.Fatal(err)
		}
	}

	var first struct{ TS bson.Timestamp }
	if err := coll.FindOne(t.Context(), bson.D{{Key: "_id", Value: 10}}).Decode(&first); err != nil {
		t.Fatal(err)
	}
	if ts, ok, err := outboxes.OldestTS(t.Context(), coll); !ok || err != nil || ts != first.TS {
		t.Errorf("oldest %v of %v, %v, %v", ts, first.TS, ok, err)
	}
	if exists, err := mongodb.Exists(t.Context(), coll, bson.D{}); !exists || err != nil {
		t.Errorf("exists: %v, %v", exists, err)
	}
}

func value(t *testing.T, v any) bson.RawValue {
	t.Helper()
	typ, data, err := bson.MarshalValue(v)
	if err != nil {
		t.Fatal(err)
	}
	return bson.RawValue{Type: typ, Value: data}
}

func TestN21_FetchingIsMajorityOnThePrimary(t *testing.T) {
	t.Parallel()
	// A client that is configured to read from the nearest member.
	var mu sync.Mutex
	seen := make(map[string]int)
	c := stacktest.Client(t, options.Client().SetReadConcern(readconcern.Local()).SetReadPreference(readpref.Nearest()).SetMonitor(&event.CommandMonitor{
		Started: func(_ context.Context, e *event.CommandStartedEvent) {
			if e.CommandName == "find" || e.CommandName == "aggregate" {
				level, _ := e.Command.Lookup("readConcern", "level").StringValueOK()
				mode, _ := e.Command.Lookup("$readPreference", "mode").StringValueOK()
				mu.Lock()
				seen[level+" "+mode]++
				mu.Unlock()
			}
		},
	}))

	coll := stacktest.Database(t, c).Collection("outbox")
	doc := bson.D{{Key: "_id", Value: "7"}, {Key: "payload", Value: "x"}}
	if _, err := coll.InsertOne(t.Context(), doc); err != nil {
		t.Fatal(err)
	}

	want, _ := bson.Marshal(doc)
	if got, err := mongodb.Fetch(t.Context(), coll, value(t, "7")); err != nil || string(got) != string(want) {
		t.Errorf("%s, %v", got, err)
	}
	// The type is part of the id.
	if _, err := mongodb.Fetch(t.Context(), coll, value(t, int32(7))); !errors.Is(err, mongodb.ErrNotFound) {
		t.Errorf("another id: %v", err)
	}

	n := 0
	if err := mongodb.FetchMany(t.Context(), coll, []bson.RawValue{value(t, "7"), value(t, "8")}, func(bson.Raw) error { n++; return nil }); err != nil || n != 1 {
		t.Errorf("%d, %v", n, err)
	}
	if _, _, err := outboxes.OldestTS(t.Context(), coll); err != nil {
		t.Error(err)
	}

	mu.Lock()
	defer mu.Unlock()
	if n := seen["majority "] + seen["majority primary"]; n != 4 || len(seen) != 1 {
		t.Errorf("reads by concern and preference: %v", seen)
	}
	if now, err := mongodb.ServerTime(t.Context(), coll.Database().Client()); err != nil || time.Since(now).Abs() > time.Minute {
		t.Errorf("the server's time is %v, %v", now, err)
	}
}
