package waiting

import (
	"fmt"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
	"go.uber.org/goleak"

	"github.com/outrelay/outrelay/internal/contract/slot"
	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/mongodb"
)

func TestMain(m *testing.M) {
	stacktest.Wide(4)
	goleak.VerifyTestMain(stacktest.Settled(m, goleak.Find))
}

// newColl returns the collection of a store with its indexes. With options, the collection exists before them.
func newColl(t *testing.T, opts ...options.Lister[options.CreateCollectionOptions]) *mongo.Collection {
	t.Helper()
	coll := mongodb.Majority(stacktest.Database(t, stacktest.Client(t)).Collection("outrelay_waiting"))
	if len(opts) > 0 {
		if err := coll.Database().CreateCollection(t.Context(), coll.Name(), opts...); err != nil {
			t.Fatal(err)
		}
	}
	if err := mongodb.EnsureIndexSet(t.Context(), coll, Indexes()); err != nil {
		t.Fatal(err)
	}
	return coll
}

func storeOf(coll *mongo.Collection) *Store { return NewStore(coll, "orders", slot.Range{}) }

// newEntry returns an envelope of the stream that waits for topic a.
func newEntry(t *testing.T, n int, key string, change ...func(*Entry)) Entry {
	t.Helper()
	e := Entry{
		Watcher: "orders", NS: "shop.outbox", Key: key, Pos: fmt.Sprintf("82%06d", n), Pending: []string{"a"}, Reason: Parked, Origin: OriginStream,
		Raw: marshal(t, bson.D{{Key: "_id", Value: int32(n)}, {Key: "payload", Value: "p"}}),
	}
	for _, c := range change {
		c(&e)
	}
	return e
}

func at(d time.Duration) func(*Entry) {
	return func(e *Entry) { e.Reason, e.NextAt = Retry, time.Now().Add(d) }
}

func marshal(t *testing.T, d bson.D) bson.Raw {
	t.Helper()
	raw, err := bson.Marshal(d)
	if err != nil {
		t.Fatal(err)
	}
	return raw
}

func enter(t *testing.T, coll *mongo.Collection, list ...Entry) {
	t.Helper()
	if err := Enter(t.Context(), coll, list); err != nil {
		t.Fatal(err)
	}
}

// readAll calls take for each envelope of a scan, in pages of limit.
func readAll(t *testing.T, s *Scan, limit int, take func(d *Document)) {
	t.Helper()
	for more := true; more; {
		var err error
		more, err = s.Page(t.Context(), limit, func(raw bson.Raw) error {
			d := ReadDocument(raw)
			take(&d)
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
}

func count(t *testing.T, coll *mongo.Collection, filter bson.D) int64 {
	t.Helper()
	n, err := coll.CountDocuments(t.Context(), filter)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

func find(t *testing.T, coll *mongo.Collection, n int) bson.M {
	t.Helper()
	var m bson.M
	if err := coll.FindOne(t.Context(), bson.D{{Key: "id", Value: int32(n)}}).Decode(&m); err != nil {
		t.Fatal(n, err)
	}
	return m
}
