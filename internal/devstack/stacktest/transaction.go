package stacktest

import (
	"context"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
)

// InsertPatience is what an insert may take beside a change of its collection: half a second, and what a loaded machine adds.
const InsertPatience = time.Second

// Transaction is one of a service that stays open.
type Transaction struct {
	tb      testing.TB
	session *mongo.Session
}

// OpenTransaction begins a transaction that has inserted a document into coll.
func OpenTransaction(tb testing.TB, coll *mongo.Collection) *Transaction {
	tb.Helper()
	if err := coll.Database().CreateCollection(tb.Context(), coll.Name()); err != nil && !mongo.IsDuplicateKeyError(err) {
		tb.Logf("creating the collection: %v", err) // it is there
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

// CommitAfter commits it so long after now, and returns then.
func (t *Transaction) CommitAfter(d time.Duration) {
	t.tb.Helper()
	<-time.After(d)
	if err := t.session.CommitTransaction(t.tb.Context()); err != nil {
		t.tb.Error(err)
	}
}

// SlowestInsert inserts documents into coll one after the other until slowest is called, which returns what the slowest insert took.
func SlowestInsert(tb testing.TB, coll *mongo.Collection) (slowest func() time.Duration) {
	ctx, cancel := context.WithCancel(context.WithoutCancel(tb.Context()))
	ended := make(chan time.Duration, 1)
	go func() {
		var worst time.Duration
		for ctx.Err() == nil {
			began := time.Now()
			if _, err := coll.InsertOne(context.WithoutCancel(ctx), bson.D{{Key: "beside", Value: true}}); err != nil {
				tb.Errorf("an insert beside a change: %v", err)
				break
			}
			worst = max(worst, time.Since(began))
			select {
			case <-ctx.Done():
			case <-time.After(5 * time.Millisecond):
			}
		}
		ended <- worst
	}()
	stop := func() time.Duration {
		cancel()
		d := <-ended
		ended <- d
		return d
	}
	tb.Cleanup(func() { stop() })
	return stop
}
