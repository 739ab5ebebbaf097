package schema_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.uber.org/goleak"

	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/mongodb/schema"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(stacktest.Settled(m, goleak.Find)) }

func createIndex(coll *mongo.Collection) func(context.Context) error {
	return func(ctx context.Context) error {
		_, err := coll.Indexes().CreateOne(ctx, mongo.IndexModel{Keys: bson.D{{Key: "a", Value: 1}}})
		return err
	}
}

// An index is created next to a transaction that has written to the collection. Until the transaction ends, other
// inserts continue. Afterwards the index exists.
func TestAChangeDoesNotBlockInsertsBesideAnOpenTransaction(t *testing.T) {
	t.Parallel()
	coll := stacktest.Database(t, stacktest.Client(t)).Collection("outbox")
	open := stacktest.OpenTransaction(t, coll)
	longestWait := stacktest.LongestInsertWait(t, coll)
	made := make(chan error, 1)
	go func() { made <- schema.Change(t.Context(), coll, createIndex(coll)) }()

	open.CommitAfter(2 * time.Second)
	if err := <-made; err != nil {
		t.Fatal(err)
	}
	if d := longestWait(); d > stacktest.InsertPatience {
		t.Errorf("an insert waited %v, want at most %v", d, stacktest.InsertPatience)
	}
	if specs, err := coll.Indexes().ListSpecifications(t.Context()); err != nil || len(specs) != 2 {
		t.Errorf("%d indexes, %v", len(specs), err)
	}
}

// One that is called off while it waits for a transaction leaves nothing behind that writers would wait for.
func TestAChangeThatIsCalledOffReleasesWriters(t *testing.T) {
	t.Parallel()
	coll := stacktest.Database(t, stacktest.Client(t)).Collection("outbox")
	open := stacktest.OpenTransaction(t, coll)
	longestWait := stacktest.LongestInsertWait(t, coll)
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	if err := schema.Change(ctx, coll, createIndex(coll)); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("ended with %v", err)
	}

	open.CommitAfter(2 * time.Second)
	if d := longestWait(); d > stacktest.InsertPatience {
		t.Errorf("an insert waited %v, want at most %v", d, stacktest.InsertPatience)
	}
}

// The error of the change itself is returned as it is.
func TestAChangeReturnsItsError(t *testing.T) {
	t.Parallel()
	coll := stacktest.Database(t, stacktest.Client(t)).Collection("outbox")
	want := errors.New("conflict")
	if err := schema.Change(t.Context(), coll, func(context.Context) error { return want }); !errors.Is(err, want) {
		t.Errorf("got %v", err)
	}
}
