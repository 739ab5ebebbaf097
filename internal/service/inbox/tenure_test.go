package inbox_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/service/inbox"
)

// openTransaction begins a transaction that has admitted the entries, like a process that is killed then.
func (b bundle) openTransaction(t *testing.T, x *inbox.Inbox, list ...inbox.Entry) *mongo.Session {
	t.Helper()
	s, err := b.client.StartSession()
	if err != nil {
		t.Fatal(err)
	}

	t.Cleanup(func() { s.EndSession(context.WithoutCancel(t.Context())) })
	if err := s.StartTransaction(); err != nil {
		t.Fatal(err)
	}

	fresh, err := x.Admit(mongo.NewSessionContext(t.Context(), s), list)
	if err != nil || !fresh[0] {
		t.Fatal(fresh, err)
	}

	return s
}

// silence makes all processes look as if they had given no sign of life for a minute.
func (b bundle) silence(t *testing.T) {
	t.Helper()
	_, err := b.db.Collection("inbox_tenures").UpdateMany(t.Context(), bson.D{}, mongo.Pipeline{
		{{Key: "$set", Value: bson.D{{Key: "at", Value: bson.D{{Key: "$subtract", Value: bson.A{"$$NOW", 60_000}}}}}}},
	})
	if err != nil {
		t.Fatal(err)
	}
}

// checkEnded checks that the server has ended the transaction, with an error that lets the whole transaction run again.
func checkEnded(t *testing.T, s *mongo.Session) {
	t.Helper()
	err := s.CommitTransaction(t.Context())
	var labeled mongo.LabeledError
	if !errors.As(err, &labeled) || !labeled.HasErrorLabel("TransientTransactionError") {
		t.Errorf("the commit's error is %v", err)
	}
}

// The uncommitted writes of a killed process are released as soon as another process attaches, not
// after the minute that the server allows.
func TestAKilledProcessHoldsNobodyUp(t *testing.T) {
	t.Parallel()
	b := setup(t)
	killed, next := b.newInbox(t), b.newInbox(t)
	if _, err := attach(t, killed, 1000); err != nil {
		t.Fatal(err)
	}

	// These are committed before, so that the watermark exists and can conflict.
	b.admit(t, killed, newEntryAt("1", 0, 1))
	s := b.openTransaction(t, killed, newEntryAt("2", 0, 2))
	b.silence(t)
	if _, err := attach(t, next, 1000); err != nil {
		t.Fatal(err)
	}

	// The limit is below the lifetime of a transaction.
	ctx, cancel := context.WithTimeout(t.Context(), 40*time.Second)
	defer cancel()
	err := b.transaction(ctx, func(ctx context.Context) error {
		fresh, err := next.Admit(ctx, []inbox.Entry{newEntryAt("2", 0, 2)})
		if err == nil && !fresh[0] {
			err = errors.New("it is not fresh")
		}

		return err
	})
	if err != nil {
		t.Fatal(err)
	}

	// The first process is alive after all. It cannot commit.
	checkEnded(t, s)

	if n := b.countDocuments(t, "inbox", bson.D{{Key: "_id.i", Value: "2"}}); n != 1 {
		t.Errorf("%d markers", n)
	}
}

// A transaction continues while its process gives signs of life, also if the process has not given its partition back. When it
// becomes silent, the next owner ends the transaction with a heartbeat.
func TestOnlyASilentOwnerLosesItsTransactions(t *testing.T) {
	t.Parallel()
	b := setup(t)
	first, next := b.newInbox(t), b.newInbox(t)
	if _, err := attach(t, first, 1000); err != nil {
		t.Fatal(err)
	}
	lives := b.openTransaction(t, first, newEntryAt("1", 0, 1))
	dies := b.openTransaction(t, first, newEntryAt("2", 1, 2))
	b.silence(t)
	// A sign of life after a silence counts.
	if err := first.Heartbeat(t.Context()); err != nil {
		t.Fatal(err)
	}

	if _, err := attach(t, next, 1000); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(next.Heartbeat(t.Context()), lives.CommitTransaction(t.Context())); err != nil {
		t.Fatal(err)
	}

	b.silence(t)
	if err := next.Heartbeat(t.Context()); err != nil {
		t.Fatal(err)
	}
	checkEnded(t, dies)
}

// A member of a cooperative group gives some partitions back and keeps the others. The next owners of the former do not end
// the transactions of the latter.
func TestAPartitionThatWasGivenBackHasNoMark(t *testing.T) {
	t.Parallel()
	b := setup(t)
	stays, comes := b.newInbox(t), b.newInbox(t)
	attachBoth := func(x *inbox.Inbox, parts ...int32) {
		t.Helper()
		for _, p := range parts {
			if _, err := x.Attach(t.Context(), "group/a", "orders", p, inbox.Log{End: 1000, Epoch: -1}); err != nil {
				t.Fatal(err)
			}
		}
	}
	attachBoth(stays, 0, 1, 2)
	s := b.openTransaction(t, stays, newEntryAt("1", 0, 1))
	given := []inbox.Partition{{Consumer: "group/a", Topic: "orders", Number: 1}, {Consumer: "group/a", Topic: "orders", Number: 2}}
	if err := stays.Release(t.Context(), given...); err != nil {
		t.Fatal(err)
	}
	if n := b.countDocuments(t, "inbox_offsets", bson.D{{Key: "by", Value: bson.D{{Key: "$type", Value: "string"}}}}); n != 1 {
		t.Errorf("%d partitions have a mark of their owner, want 1", n)
	}

	// Even if the member looks dead: the partitions are no longer its own.
	b.silence(t)
	attachBoth(comes, 1, 2)
	if err := errors.Join(comes.Heartbeat(t.Context()), s.CommitTransaction(t.Context())); err != nil {
		t.Error(err)
	}
}

// If a process uses a session of a former handler's transaction for something else, this continues
// when another process takes its partition.
func TestAProcessThatLivesKeepsItsCursors(t *testing.T) {
	t.Parallel()
	b := setup(t)
	first, next := b.newInbox(t), b.newInbox(t)
	if _, err := attach(t, first, 1000); err != nil {
		t.Fatal(err)
	}

	s := b.openTransaction(t, first, newEntryAt("1", 0, 1))
	if err := s.CommitTransaction(t.Context()); err != nil {
		t.Fatal(err)
	}

	coll := b.db.Collection("others")
	for i := range 10 {
		if _, err := coll.InsertOne(t.Context(), bson.D{{Key: "_id", Value: i}}); err != nil {
			t.Fatal(err)
		}
	}

	ctx := mongo.NewSessionContext(t.Context(), s)
	cur, err := coll.Find(ctx, bson.D{}, options.Find().SetBatchSize(2))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := attach(t, next, 1000); err != nil {
		t.Fatal(err)
	}

	var all []bson.D
	if err := cur.All(ctx, &all); err != nil || len(all) != 10 {
		t.Errorf("%d documents, %v", len(all), err)
	}
}

// One Inbox may serve several consumers. If one of them gives a partition back, the others keep it.
func TestAConsumerGivesBackOnlyItsOwn(t *testing.T) {
	t.Parallel()
	b := setup(t)
	x := b.newInbox(t)
	at := func(consumer string) inbox.Entry {
		e := newEntryAt("1", 0, 1)
		e.Key.Consumer = consumer
		return e
	}

	for _, consumer := range []string{"a/h", "b/h"} {
		if _, err := x.Attach(t.Context(), consumer, "orders", 0, inbox.Log{End: 1000, Epoch: -1}); err != nil {
			t.Fatal(err)
		}
	}

	claim, err := x.Claim(t.Context(), at("b/h"), time.Minute)
	if err != nil {
		t.Fatal(err)
	}

	// Open writes the tenure.
	s := b.openTransaction(t, x, at("c/h"))
	if err := x.Release(t.Context(), inbox.Partition{Consumer: "a/h", Topic: "orders"}); err != nil {
		t.Fatal(err)
	}

	if _, err := b.newInbox(t).Claim(t.Context(), at("b/h"), time.Minute); !errors.Is(err, inbox.ErrInProgress) {
		t.Errorf("the claim of the other consumer: %v", err)
	}

	if n := b.countDocuments(t, "inbox_tenures", bson.D{}); n != 1 {
		t.Errorf("%d tenures", n)
	}

	if err := errors.Join(claim.Release(t.Context()), s.AbortTransaction(t.Context())); err != nil {
		t.Error(err)
	}
}

// The watermarks of a consumer that no longer exists can be deleted.
func TestWatermarksCanBeForgotten(t *testing.T) {
	t.Parallel()
	b := setup(t)
	x := b.newInbox(t)
	if _, err := attach(t, x, 1000); err != nil {
		t.Fatal(err)
	}

	b.admit(t, x, newEntryAt("1", 0, 1), newEntryAt("2", 1, 1))
	if _, err := b.store().Forget(t.Context(), "", ""); !errors.Is(err, inbox.ErrInvalid) {
		t.Errorf("forgetting without a name: %v, want invalid", err)
	}

	if n, err := b.store().Forget(t.Context(), "group/a", "another"); n != 0 || err != nil {
		t.Errorf("of another topic: %d, %v", n, err)
	}

	if n, err := b.store().Forget(t.Context(), "group/a", ""); n != 3 || err != nil {
		t.Errorf("%d, %v", n, err)
	}

	if n, err := b.store().Forget(t.Context(), "group/a", ""); n != 0 || err != nil {
		t.Errorf("afterwards %d documents are there, %v", n, err)
	}
}

// Transactions for a partition that was given back continue.
func TestAPartitionThatWasGivenBackIsNotFreed(t *testing.T) {
	t.Parallel()
	b := setup(t)
	first, next := b.newInbox(t), b.newInbox(t)
	if _, err := attach(t, first, 1000); err != nil {
		t.Fatal(err)
	}

	b.admit(t, first, newEntryAt("1", 0, 1))
	if n := b.countDocuments(t, "inbox_tenures", bson.D{}); n != 1 {
		t.Fatalf("%d tenures", n)
	}

	s := b.openTransaction(t, first, newEntry("elsewhere"))
	if err := first.Release(t.Context(), inbox.Partition{Consumer: "group/a", Topic: "orders"}); err != nil {
		t.Fatal(err)
	}

	if n := b.countDocuments(t, "inbox_tenures", bson.D{}); n != 0 {
		t.Errorf("%d tenures are left", n)
	}

	if _, err := attach(t, next, 1000); err != nil {
		t.Fatal(err)
	}

	if err := s.CommitTransaction(t.Context()); err != nil {
		t.Error(err)
	}

	// The same process may get it again, and may hold others.
	for range 2 {
		if _, err := attach(t, first, 1000); err != nil {
			t.Fatal(err)
		}
		if _, err := attach(t, next, 1000); err != nil {
			t.Fatal(err)
		}
	}

	if fresh := b.admit(t, next, newEntryAt("2", 0, 2)); !fresh[0] {
		t.Error("it is not fresh")
	}
}
