package inbox_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/pkg/inbox"
)

// open begins a transaction that has admitted the entries, as a process has that is about to be killed.
func (b bundle) open(t *testing.T, x *inbox.Inbox, list ...inbox.Entry) *mongo.Session {
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

// What a killed process has in a transaction is free as soon as somebody else attaches, not after the minute that the
// server gives it.
func TestAKilledProcessHoldsNobodyUp(t *testing.T) {
	t.Parallel()
	b := setup(t)
	killed, next := b.new(t), b.new(t)
	if _, err := attach(t, killed, 1000); err != nil {
		t.Fatal(err)
	}
	// Admitted and committed before, so that there is a watermark to be in the way.
	b.admit(t, killed, placed("1", 0, 1))
	s := b.open(t, killed, placed("2", 0, 2))
	if _, err := attach(t, next, 1000); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 40*time.Second) // below the lifetime of a transaction
	defer cancel()
	err := b.transaction(ctx, func(ctx context.Context) error {
		fresh, err := next.Admit(ctx, []inbox.Entry{placed("2", 0, 2)})
		if err == nil && !fresh[0] {
			err = errors.New("it is not fresh")
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	// It was a zombie after all: it cannot commit, and is told so as of something to be tried again.
	err = s.CommitTransaction(t.Context())
	var labeled mongo.LabeledError
	if !errors.As(err, &labeled) || !labeled.HasErrorLabel("TransientTransactionError") {
		t.Errorf("the commit's error is %v", err)
	}
	if n := b.count(t, "inbox", bson.D{{Key: "_id.i", Value: "2"}}); n != 1 {
		t.Errorf("%d markers", n)
	}
}

// What was given back properly is left alone, whatever else its process does.
func TestAPartitionThatWasGivenBackIsNotFreed(t *testing.T) {
	t.Parallel()
	b := setup(t)
	first, next := b.new(t), b.new(t)
	if _, err := attach(t, first, 1000); err != nil {
		t.Fatal(err)
	}
	b.admit(t, first, placed("1", 0, 1))
	if n := b.count(t, "inbox_tenures", bson.D{}); n != 1 {
		t.Fatalf("%d tenures", n)
	}
	s := b.open(t, first, entry("elsewhere"))
	if err := first.Release(t.Context(), "orders", 0); err != nil {
		t.Fatal(err)
	}
	if n := b.count(t, "inbox_tenures", bson.D{}); n != 0 {
		t.Errorf("%d tenures are left", n)
	}
	if _, err := attach(t, next, 1000); err != nil {
		t.Fatal(err)
	}
	if err := s.CommitTransaction(t.Context()); err != nil {
		t.Error(err)
	}
	// The same process may have it again, and hold others.
	for range 2 {
		if _, err := attach(t, first, 1000); err != nil {
			t.Fatal(err)
		}
		if _, err := attach(t, next, 1000); err != nil {
			t.Fatal(err)
		}
	}
	if fresh := b.admit(t, next, placed("2", 0, 2)); !fresh[0] {
		t.Error("it is not fresh")
	}
}
