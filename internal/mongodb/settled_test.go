package mongodb_test

import (
	"fmt"
	"sync"
	"testing"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/mongodb"
)

// A transaction of 40 MB makes a collection. Its commit takes long after the server has given it a time, and other writes get later times
// in this time. A settled time is before the commit, or the list after it contains the collection.
func TestN22_NoCommitBeforeASettledTimeAppearsAfterIt(t *testing.T) {
	t.Parallel()
	client := stacktest.Client(t)
	db := stacktest.Database(t, client)
	for round := range 3 {
		name := fmt.Sprint("made", round)
		commit := beginLarge(t, db.Collection(name))

		var without []bson.Timestamp // settled times before a list without the collection
		var mu sync.Mutex
		var observers sync.WaitGroup
		committed := make(chan struct{})
		for range 4 {
			observers.Go(func() {
				for ended := false; !ended; {
					select {
					case <-committed:
						ended = true
					default:
					}
					at, listed := listAtSettledTime(t, db, name)
					mu.Lock()
					if !listed {
						without = append(without, at)
					}
					mu.Unlock()
				}
			})
		}
		err := commit()
		close(committed)
		observers.Wait()
		if err != nil {
			t.Fatal(err)
		}

		made := readCommitTime(t, db.Collection(name))
		for _, at := range without {
			if !at.Before(made) {
				t.Errorf("the list after %v is without the collection that a commit at %v made", at, made)
			}
		}
	}
}

// beginLarge inserts 40 MB into a new collection, in a transaction that the result commits.
func beginLarge(t *testing.T, coll *mongo.Collection) (commit func() error) {
	t.Helper()
	session, err := coll.Database().Client().StartSession()
	if err == nil {
		t.Cleanup(func() { session.EndSession(t.Context()) })
		err = session.StartTransaction()
	}
	if err != nil {
		t.Fatal(err)
	}

	docs := make([]any, 40)
	for i := range docs {
		docs[i] = bson.D{{Key: "bytes", Value: make([]byte, 1_000_000)}}
	}
	if _, err := coll.InsertMany(mongo.NewSessionContext(t.Context(), session), docs); err != nil {
		t.Fatal(err)
	}
	return func() error { return session.CommitTransaction(t.Context()) }
}

// listAtSettledTime makes another write, and returns a settled time, and whether a list after it contains a collection.
func listAtSettledTime(t *testing.T, db *mongo.Database, name string) (at bson.Timestamp, listed bool) {
	other := db.Collection("other")
	_, err := other.InsertOne(t.Context(), bson.D{})
	if err == nil {
		at, err = mongodb.SettledTime(t.Context(), other)
	}

	var names []string
	if err == nil {
		names, err = db.ListCollectionNames(t.Context(), bson.D{{Key: "name", Value: name}})
	}
	if err != nil {
		t.Error(err)
	}
	return at, len(names) > 0
}

// readCommitTime returns the time of the commit that made a collection: its last entry in the oplog.
func readCommitTime(t *testing.T, coll *mongo.Collection) bson.Timestamp {
	t.Helper()
	var entry struct {
		TS bson.Timestamp `bson:"ts"`
	}
	last := options.FindOne().SetSort(bson.D{{Key: "$natural", Value: -1}})
	err := coll.Database().Client().Database("local").Collection("oplog.rs").
		FindOne(t.Context(), bson.D{{Key: "o.applyOps.ns", Value: mongodb.Namespace(coll)}}, last).Decode(&entry)
	if err != nil {
		t.Fatal(err)
	}
	return entry.TS
}
