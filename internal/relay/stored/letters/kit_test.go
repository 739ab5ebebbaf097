package letters

import (
	"context"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
	"go.uber.org/goleak"

	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/mongodb"
)

func TestMain(m *testing.M) {
	stacktest.Wide(4)
	goleak.VerifyTestMain(stacktest.Settled(m, goleak.Find))
}

// bench is a state database with the collection of the letters, and its owner.
type bench struct {
	t    *testing.T
	db   *mongo.Database
	coll *mongo.Collection
	now  time.Time // of the next letter
}

func setUp(t *testing.T, opts ...*options.ClientOptions) *bench {
	t.Helper()
	db := mongodb.Database(stacktest.Client(t, opts...), stacktest.Database(t, stacktest.Client(t)).Name())
	b := &bench{t: t, db: db, coll: db.Collection("outrelay_letters"), now: time.Now().Add(-time.Minute).Truncate(time.Millisecond)}
	if err := mongodb.EnsureIndexSet(t.Context(), b.coll, Indexes()); err != nil {
		t.Fatal(err)
	}
	return b
}

// Fenced is a transaction of an owner that nobody deposes.
func (b *bench) Fenced(ctx context.Context, _ bson.D, fn func(context.Context) error) error {
	s, err := b.db.Client().StartSession()
	if err != nil {
		return err
	}
	defer s.EndSession(context.WithoutCancel(ctx))

	_, err = s.WithTransaction(ctx, func(ctx context.Context) (any, error) { return nil, fn(ctx) })
	return err
}

// newLetter returns the letter of an envelope.
func (b *bench) newLetter(doc bson.D, change ...func(*Letter)) Letter {
	b.t.Helper()
	raw, err := bson.Marshal(doc)
	if err != nil {
		b.t.Fatal(err)
	}

	l := Letter{
		Watcher:   "orders",
		NS:        "shop.outbox",
		Raw:       raw,
		Class:     record.Malformed,
		Reason:    "type is missing",
		Topic:     "outbox.event.order",
		Partition: 3,
		Pos:       "8265",
		Origin:    "stream",
		Source:    Source{Kind: "relay", Watcher: "orders", Node: "a", Epoch: 1},
	}
	for _, c := range change {
		c(&l)
	}
	return l
}

// write stores the letters as the ledger of an owner does, and returns their ids.
func (b *bench) write(list ...Letter) []string {
	b.t.Helper()
	ids := make([]string, len(list))
	prepared := make([]*Prepared, len(list))
	for i, l := range list {
		p, err := Prepare(l)
		if err != nil {
			b.t.Fatal(err)
		}
		prepared[i], ids[i] = p, p.ID()
	}
	if err := b.store(prepared...); err != nil {
		b.t.Fatal(err)
	}
	return ids
}

func (b *bench) store(list ...*Prepared) error {
	if err := WriteChunks(b.t.Context(), b, b.coll, list); err != nil {
		return err
	}
	return b.Fenced(b.t.Context(), nil, func(tx context.Context) error { return Write(tx, b.coll, b.now, list) })
}

func (b *bench) open(id string) Dead {
	b.t.Helper()
	d, err := Open(b.t.Context(), b.coll, id)
	if err != nil {
		b.t.Fatal(err)
	}
	return d
}

func (b *bench) count(filter bson.D) int64 {
	b.t.Helper()
	n, err := mongodb.Majority(b.coll).CountDocuments(b.t.Context(), filter)
	if err != nil {
		b.t.Fatal(err)
	}
	return n
}
