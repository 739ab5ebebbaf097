package stacktest

import (
	"context"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
)

// InsertPatience is how long an insert may wait for locks during a change of its collection: half a second,
// and as much again because a loaded machine delays the relay when it calls the change off.
const InsertPatience = time.Second

// Transaction is an open transaction of a service.
type Transaction struct {
	tb      testing.TB
	session *mongo.Session
}

// OpenTransaction starts a transaction and inserts a document into coll.
func OpenTransaction(tb testing.TB, coll *mongo.Collection) *Transaction {
	tb.Helper()
	if err := coll.Database().CreateCollection(tb.Context(), coll.Name()); err != nil && !mongo.IsDuplicateKeyError(err) {
		// The collection may exist already.
		tb.Logf("creating the collection: %v", err)
	}

	session, err := coll.Database().Client().StartSession()
	if err == nil {
		err = session.StartTransaction()
	}
	if err == nil {
		_, err = coll.InsertOne(mongo.NewSessionContext(tb.Context(), session), bson.D{{Key: "open", Value: true}})
	}
	if err != nil {
		tb.Fatal(err)
	}

	tb.Cleanup(func() { session.EndSession(context.WithoutCancel(tb.Context())) })
	return &Transaction{tb: tb, session: session}
}

// CommitAfter blocks for duration and then commits the transaction.
func (t *Transaction) CommitAfter(duration time.Duration) {
	t.tb.Helper()
	<-time.After(duration)
	if err := t.session.CommitTransaction(t.tb.Context()); err != nil {
		t.tb.Error(err)
	}
}

// LongestInsertWait inserts documents into coll one after the other until the function that it returns is
// called, which returns how long the insert that waited longest for locks has waited. The server's profiler
// measures the wait: the duration of an insert, measured here, is mostly a matter of the machine's load.
func LongestInsertWait(tb testing.TB, coll *mongo.Collection) (longest func() time.Duration) {
	tb.Helper()
	db := coll.Database()
	profile := bson.D{{Key: "profile", Value: 1}, {Key: "filter", Value: bson.D{
		{Key: "ns", Value: db.Name() + "." + coll.Name()}, {Key: "op", Value: "insert"},
	}}}
	err := db.RunCommand(tb.Context(), bson.D{{Key: "create", Value: "system.profile"}, {Key: "capped", Value: true}, {Key: "size", Value: 16 << 20}}).Err()
	if err == nil {
		err = db.RunCommand(tb.Context(), profile).Err()
	}
	if err != nil {
		tb.Fatal(err)
	}

	ctx, cancel := context.WithCancel(context.WithoutCancel(tb.Context()))
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for ctx.Err() == nil {
			if _, err := coll.InsertOne(context.WithoutCancel(ctx), bson.D{{Key: "inserted", Value: true}}); err != nil {
				tb.Errorf("inserting during a change of the collection: %v", err)
				return
			}
			select {
			case <-ctx.Done():
			case <-time.After(5 * time.Millisecond):
			}
		}
	}()
	stop := func() {
		cancel()
		<-ended
	}
	tb.Cleanup(stop)
	return func() time.Duration {
		tb.Helper()
		stop()
		return longestLockWait(tb, db)
	}
}

// longestLockWait returns the longest time that a profiled operation has waited for locks of all kinds.
func longestLockWait(tb testing.TB, db *mongo.Database) time.Duration {
	tb.Helper()
	type lock struct {
		TimeAcquiringMicros map[string]int64 `bson:"timeAcquiringMicros"`
	}
	var profiled []struct {
		Locks map[string]lock `bson:"locks"`
	}
	cur, err := db.Collection("system.profile").Find(tb.Context(), bson.D{})
	if err == nil {
		err = cur.All(tb.Context(), &profiled)
	}
	if err != nil {
		tb.Fatal(err)
	}
	if len(profiled) == 0 {
		tb.Fatal("the profiler recorded no insert, so the longest wait is unknown")
	}

	var longest time.Duration
	for _, operation := range profiled {
		var waited time.Duration
		for _, l := range operation.Locks {
			for _, micros := range l.TimeAcquiringMicros {
				waited += time.Duration(micros) * time.Microsecond
			}
		}
		longest = max(longest, waited)
	}
	return longest
}
