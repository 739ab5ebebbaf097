package deadletter

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
	"go.uber.org/goleak"

	"github.com/outrelay/outrelay/internal/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/lease"
	"github.com/outrelay/outrelay/internal/record"
	"github.com/outrelay/outrelay/internal/store"
)

func TestMain(m *testing.M) {
	stacktest.Wide(4)
	goleak.VerifyTestMain(stacktest.Settled(m, goleak.Find))
}

// bench is a database with an outbox, and the owner of a watcher.
type bench struct {
	t     *testing.T
	db    *mongo.Database
	owner *counted
}

// counted counts the transactions of the owner.
type counted struct {
	*lease.Held
	n int
}

func (c *counted) Fenced(ctx context.Context, dirty []string, fn func(context.Context) error) error {
	c.n++
	return c.Held.Fenced(ctx, dirty, fn)
}

func setUp(t *testing.T) *bench {
	t.Helper()
	db := stacktest.Database(t, stacktest.Client(t))
	return &bench{t: t, db: db, owner: &counted{Held: own(t, db, "a")}}
}

// own acquires a lease that lasts longer than any test: nobody has to renew it.
func own(t *testing.T, db *mongo.Database, node string) *lease.Held {
	t.Helper()
	l, err := lease.New(lease.Config{Collection: db.Collection("watchers"), ID: "orders/0of1", Node: node, TTL: time.Hour, Renew: 200 * time.Millisecond, ReplicaSetID: "here"})
	if err != nil {
		t.Fatal(err)
	}
	h, err := l.Acquire(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return h
}

// add inserts an envelope and returns its letter.
func (b *bench) add(id any, fields ...bson.E) Letter {
	b.t.Helper()
	doc := append(bson.D{{Key: "_id", Value: id}, {Key: "aggregatetype", Value: "order"}}, fields...)
	if _, err := b.db.Collection("outbox").InsertOne(b.t.Context(), doc); err != nil {
		b.t.Fatal(err)
	}
	return b.letter(doc)
}

func (b *bench) letter(doc bson.D) Letter {
	b.t.Helper()
	raw, err := bson.Marshal(doc)
	if err != nil {
		b.t.Fatal(err)
	}
	return Letter{
		NS: b.db.Name() + ".outbox", Raw: raw, Class: record.Malformed, Reason: "type is missing", Topic: "outbox.event.order",
		Partition: 3, Pos: "8265", Source: Source{Kind: "relay", Watcher: "orders", Node: "a", Epoch: 1},
	}
}

func (b *bench) count(coll string) int64 {
	b.t.Helper()
	n, err := store.Majority(b.db.Collection(coll)).CountDocuments(b.t.Context(), bson.D{})
	if err != nil {
		b.t.Fatal(err)
	}
	return n
}

func (b *bench) move(letters ...Letter) Result {
	b.t.Helper()
	r, err := Move(b.t.Context(), b.owner, letters)
	if err != nil {
		b.t.Fatal(err)
	}
	return r
}

func (b *bench) id(l Letter, delivery int32) ID {
	return ID{NS: l.NS, ID: bson.Raw(l.Raw).Lookup("_id"), Delivery: delivery}
}

func TestMoveIsIdempotentAndKeepsTheWholeEnvelope(t *testing.T) {
	t.Parallel()
	b := setUp(t)
	healthy := b.add("healthy")
	// Names that an update might take for operators or paths, bytes, and a reason that is no UTF-8.
	l := b.add("x", bson.E{Key: "payload", Value: bson.D{{Key: "$set", Value: 1}, {Key: "a.b", Value: bson.Binary{Data: []byte{0, 255}}}}})
	l.Reason = "bad \xff byte " + strings.Repeat("r", 2*maxReason)
	l2 := b.add(bson.NewObjectID())
	l2.Attempts = []Attempt{{At: time.UnixMilli(1000), Class: record.RecordRefused, Reason: "first"}, {At: time.UnixMilli(2000), Class: record.AttemptsExhausted, Reason: "last"}}
	l2.Partition = record.AnyPartition
	if r := b.move(l, l2); r != (Result{Moved: 2, Deleted: 2}) {
		t.Errorf("first: %+v", r)
	}
	d, err := Open(t.Context(), b.db, b.id(l, 0))
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(d.Envelope, l.Raw) || d.Class != record.Malformed || d.Topic != l.Topic || *d.Partition != 3 || d.Pos != "8265" ||
		d.Source.Epoch != 1 || len(d.Attempts) != 1 || d.MovedAt.IsZero() || !d.FirstFailure.Equal(d.MovedAt) || !strings.HasPrefix(d.Reason, "bad \uFFFD byte") || len(d.Reason) > maxReason+8 {
		t.Errorf("letter: %+v", d)
	}
	again := l
	again.Reason = "another"
	if r := b.move(again); r != (Result{Known: 1}) {
		t.Errorf("again: %+v", r)
	}
	if d2, err := Open(t.Context(), b.db, b.id(l, 0)); err != nil || d2.Reason != d.Reason || !d2.MovedAt.Equal(d.MovedAt) {
		t.Errorf("a repetition changed the letter: %+v, %v", d2, err)
	}
	if d, err := Open(t.Context(), b.db, b.id(l2, 0)); err != nil || d.Partition != nil || len(d.Attempts) != 2 || d.FirstFailure.UnixMilli() != 1000 || d.LastFailure.UnixMilli() != 2000 {
		t.Errorf("letter with a history: %+v, %v", d, err)
	}
	if n := b.count("outbox"); n != 1 {
		t.Errorf("%d envelopes are left, want the healthy one", n)
	}
	if _, err := Open(t.Context(), b.db, b.id(healthy, 0)); !errors.Is(err, store.ErrNotFound) {
		t.Errorf("a letter that is not there: %v", err)
	}
}

func TestN16_ALetterIsMadeFromTheStreamsImage(t *testing.T) {
	t.Parallel()
	b := setUp(t)
	gone := b.letter(bson.D{{Key: "_id", Value: "gone"}}) // inserted and deleted in one transaction
	if r := b.move(gone); r != (Result{Moved: 1}) {
		t.Errorf("%+v", r)
	}
	// Requeued meanwhile: the next delivery of the same id is another's to finish.
	old := b.letter(bson.D{{Key: "_id", Value: "again"}})
	next := b.add("again", bson.E{Key: "delivery", Value: int32(1)})
	if r := b.move(old); r != (Result{Moved: 1}) {
		t.Errorf("%+v", r)
	}
	if b.count("outbox") != 1 {
		t.Error("the requeued envelope was deleted with its old delivery")
	}
	if r := b.move(next); r != (Result{Moved: 1, Deleted: 1}) {
		t.Errorf("%+v", r)
	}
	for delivery := range int32(2) {
		if _, err := Open(t.Context(), b.db, b.id(old, delivery)); err != nil {
			t.Errorf("delivery %d: %v", delivery, err)
		}
	}
}

func TestN16_AMalformedEnvelopeKeepsItsBytes(t *testing.T) {
	t.Parallel()
	b := setUp(t)
	twice := b.letter(bson.D{{Key: "_id", Value: "twice"}, {Key: "type", Value: 1}, {Key: "type", Value: 2}})
	deep := bson.D{{Key: "leaf", Value: 1}}
	for range 170 {
		deep = bson.D{{Key: "d", Value: deep}}
	}
	nested := b.add("deep", deep...)
	if r := b.move(twice, nested); r.Moved != 2 || r.Deleted != 1 || r.Chunked != 1 {
		t.Errorf("%+v", r)
	}
	for _, l := range []Letter{twice, nested} {
		if d, err := Open(t.Context(), b.db, b.id(l, 0)); err != nil || !bytes.Equal(d.Envelope, l.Raw) {
			t.Errorf("%d bytes of %d, %v", len(d.Envelope), len(l.Raw), err)
		}
	}
}

func TestN20_LargeAndManyFit(t *testing.T) {
	t.Parallel()
	b := setUp(t)
	coll := b.db.Collection("outbox")
	large := b.add("large", bson.E{Key: "payload", Value: make([]byte, 16<<20-200)})
	large.Reason = strings.Repeat("reason ", 1000)
	if r := b.move(large); r != (Result{Moved: 1, Deleted: 1, Chunked: 1}) {
		t.Errorf("%+v", r)
	}
	if b.owner.n != 3 { // 4 chunks of 4 MiB in two transactions, then the letter
		t.Errorf("%d transactions", b.owner.n)
	}
	d, err := Open(t.Context(), b.db, b.id(large, 0))
	if err != nil || !bytes.Equal(d.Envelope, large.Raw) || d.Chunks != 4 {
		t.Errorf("%d bytes in %d chunks, %v", len(d.Envelope), d.Chunks, err)
	}
	if n, err := b.db.Collection("outbox_dead").CountDocuments(t.Context(), Letters()); err != nil || n != 1 {
		t.Errorf("%d letters without their chunks, %v", n, err)
	}
	b.owner.n = 0
	var docs []any
	var letters []Letter
	for i := range 2100 {
		doc := bson.D{{Key: "_id", Value: fmt.Sprint("many", i)}}
		docs = append(docs, doc)
		letters = append(letters, b.letter(doc))
	}
	if _, err := coll.InsertMany(t.Context(), docs, options.InsertMany().SetOrdered(false)); err != nil {
		t.Fatal(err)
	}
	if r := b.move(letters...); r != (Result{Moved: 2100, Deleted: 2100}) || b.owner.n < 3 || b.owner.n > 2100/minPartSize {
		t.Errorf("%+v in %d transactions", r, b.owner.n)
	}
	b.owner.n = 0
	letters = letters[:0]
	for i := range 3 {
		letters = append(letters, b.add(fmt.Sprint("big", i), bson.E{Key: "payload", Value: make([]byte, 5<<20)}))
	}
	if r := b.move(letters...); r.Moved != 3 || r.Deleted != 3 || b.owner.n != 3 {
		t.Errorf("%+v in %d transactions: more than 8 MiB in one", r, b.owner.n)
	}
}

func TestN03_ADeposedOwnerMovesNothing(t *testing.T) {
	t.Parallel()
	b := setUp(t)
	l := b.add("x")
	if _, err := b.db.Collection("watchers").UpdateOne(t.Context(), bson.D{}, bson.D{{Key: "$set", Value: bson.D{{Key: "expiresAt", Value: time.UnixMilli(0)}}}}); err != nil {
		t.Fatal(err)
	}
	own(t, b.db, "b") // the first one does not know yet, and finds its lease valid
	if !b.owner.Valid() {
		t.Fatal("the deposed owner knows already")
	}
	if r, err := Move(t.Context(), b.owner, []Letter{l}); !errors.Is(err, lease.ErrLeaseLost) || r != (Result{}) {
		t.Errorf("%+v, %v", r, err)
	}
	if b.count("outbox") != 1 || b.count("outbox_dead") != 0 {
		t.Error("a deposed owner moved an envelope")
	}
}

// N3: where the server is too slow for one transaction of all, there are smaller ones; else none of them would be moved, ever.
func TestN03_LettersAreMovedInPartsWhereTheServerIsSlow(t *testing.T) {
	t.Parallel()
	b := setUp(t)
	letters := []Letter{b.add("large", bson.E{Key: "payload", Value: make([]byte, 15<<20+1)})} // in chunks
	for i := range 39 {
		letters = append(letters, b.add(i))
	}
	ctx, cancel := context.WithTimeout(t.Context(), 4*time.Minute)
	defer cancel()
	slow := &stacktest.Hasty{Fence: b.owner, Coll: b.db.Collection(Collection("outbox")), Most: 1}
	if r, err := Move(ctx, slow, letters); err != nil || r != (Result{Moved: 40, Deleted: 40, Chunked: 1}) {
		t.Errorf("%+v, %v; %d attempts in vain", r, err, slow.Late.Load())
	}
	if n := b.count("outbox"); n != 0 {
		t.Errorf("%d envelopes are left", n)
	}
}

func TestMoveRefusesWhatItCannotWrite(t *testing.T) {
	t.Parallel()
	b := setUp(t)
	good := b.add("good")
	noID := b.letter(bson.D{{Key: "a", Value: 1}})
	noClass, noNS, broken := good, good, good
	noClass.Class, noNS.NS, broken.Raw = "", "outbox", good.Raw[:len(good.Raw)-1]
	for i, bad := range []Letter{noID, noClass, noNS, broken} {
		if _, err := Move(t.Context(), b.owner, []Letter{good, bad}); err == nil {
			t.Errorf("letter %d was taken", i)
		}
	}
	if b.count("outbox") != 1 {
		t.Error("something was moved all the same")
	}
	if r := b.move(); r != (Result{}) {
		t.Errorf("nothing: %+v", r)
	}
}
